#include "instances.h"

#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "domains.h"

namespace gradred::tf {
namespace {

bool IsDigit(char c) { return '0' <= c && c <= '9'; }

// The digits of `text` from `at` on, which moves behind them, without leading zeros.
std::string Digits(const std::string& text, size_t* at) {
  while (*at + 1 < text.size() && text[*at] == '0' && IsDigit(text[*at + 1])) ++*at;
  const size_t begin = *at;
  while (*at < text.size() && IsDigit(text[*at])) ++*at;
  return text.substr(begin, *at - begin);
}

// Digits count by their value.
struct ByPath {
  bool operator()(const std::string& a, const std::string& b) const {
    size_t i = 0, j = 0;
    while (i < a.size() && j < b.size()) {
      if (IsDigit(a[i]) && IsDigit(b[j])) {
        const std::string m = Digits(a, &i), n = Digits(b, &j);
        if (m.size() != n.size()) return m.size() < n.size();
        if (m != n) return m < n;
      } else if (a[i] != b[j]) {
        return a[i] < b[j];
      } else {
        ++i, ++j;
      }
    }
    const bool ended = i == a.size(), other_ended = j == b.size();
    return ended != other_ended ? ended : a < b;  // the latter for leading zeros
  }
};

}  // namespace

struct Instance::Copies {
  using Key = std::pair<std::string, std::thread::id>;

  Key key;
  std::set<std::string> nodes;
  std::set<std::string, ByPath> fresh;  // paths that are not numbered yet
  std::map<std::string, int> numbers;
};

struct Instance::Registry {
  std::mutex mutex;
  // Of functions: by name and thread, until the first kernel runs.
  std::map<Copies::Key, std::weak_ptr<Copies>> made;
  // Of sessions: by the key of the spec.
  std::map<std::string, std::shared_ptr<Copies>> lasting;

  static Registry& The() {
    static auto* registry = new Registry;
    return *registry;
  }

  // With the mutex held.
  void Close(const std::shared_ptr<Copies>& copies) {
    const auto found = made.find(copies->key);
    if (found != made.end() && found->second.lock() == copies) made.erase(found);
  }
};

Instance::Instance(TF_OpKernelConstruction* construction, std::string key) : key_(std::move(key)) {
  const TF_StringView name = TheApi().OpKernelConstruction_GetName(construction);
  const std::string node(name.data, name.len);
  const size_t slash = node.rfind('/');
  path_ = slash == std::string::npos ? "" : node.substr(0, slash);
  Registry& registry = Registry::The();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (IsOfSession(key_)) {
    std::shared_ptr<Copies>& lasting = registry.lasting[key_];
    if (lasting == nullptr) lasting = std::make_shared<Copies>();
    copies_ = lasting;
  } else {
    const Copies::Key made_by(DomainOf(key_), std::this_thread::get_id());
    std::weak_ptr<Copies>& made = registry.made[made_by];
    copies_ = made.lock();
    if (copies_ == nullptr || copies_->nodes.count(node) > 0) {  // a graph has a node once
      copies_ = std::make_shared<Copies>();
      copies_->key = made_by;
      made = copies_;
    }
    copies_->nodes.insert(node);
  }
  if (copies_->numbers.count(path_) == 0) copies_->fresh.insert(path_);
}

Instance::~Instance() {
  Registry& registry = Registry::The();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (copies_.use_count() == 1) registry.Close(copies_);
  copies_.reset();
}

int Instance::Number() const {
  const int known = number_.load();
  if (known >= 0) return known;
  Registry& registry = Registry::The();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.Close(copies_);
  for (const std::string& path : copies_->fresh)
    copies_->numbers.emplace(path, static_cast<int>(copies_->numbers.size()));
  copies_->fresh.clear();
  return number_ = copies_->numbers.at(path_);
}

std::string Instance::Suffix() const {
  const int number = Number();
  return number == 0 ? "" : "+" + std::to_string(number);
}

}  // namespace gradred::tf
