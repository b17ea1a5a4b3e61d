#include "instances.h"

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace gradred::tf {
namespace {

struct Paths {
  std::map<std::string, int> numbers;
  std::set<std::string> fresh;  // not numbered yet
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, Paths> domains;
};
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

// The folder of the node's name.
std::string PathOf(TF_OpKernelConstruction* construction) {
  const TF_StringView name = TheApi().OpKernelConstruction_GetName(construction);
  const std::string text(name.data, name.len);
  const size_t slash = text.rfind('/');
  return slash == std::string::npos ? "" : text.substr(0, slash);
}

}  // namespace

Instance::Instance(TF_OpKernelConstruction* construction, std::string domain)
    : domain_(std::move(domain)), path_(PathOf(construction)) {
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  Paths& paths = TheRegistry().domains[domain_];
  if (paths.numbers.find(path_) == paths.numbers.end()) paths.fresh.insert(path_);
}

std::string Instance::Suffix() const {
  const int number = Number();
  return number == 0 ? "" : "+" + std::to_string(number);
}

int Instance::Number() const {
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  Paths& paths = TheRegistry().domains[domain_];
  for (const std::string& path : paths.fresh)
    paths.numbers.emplace(path, static_cast<int>(paths.numbers.size()));
  paths.fresh.clear();
  return paths.numbers.at(path_);
}

}  // namespace gradred::tf
