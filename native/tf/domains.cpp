#include "domains.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "engine/engine.h"

namespace gradred::tf {
namespace {

std::string Text(const engine::Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "?" : std::to_string(shape[i]);
  }
  return text + "]";
}

bool Fits(const engine::Shape& declared, const engine::Shape& actual) {
  if (declared.size() != actual.size()) return false;
  for (size_t i = 0; i < declared.size(); ++i)
    if (declared[i] >= 0 && declared[i] != actual[i]) return false;
  return true;
}

engine::DomainSpecPtr Named(const engine::DomainSpec& registered, const std::string& suffix) {
  auto named = std::make_shared<engine::DomainSpec>(registered);
  named->plan = nullptr;
  named->name = DomainOf(registered.name) + suffix;
  return named;
}

struct NamedSpec {
  engine::DomainSpecPtr registered, named;
};

// Specs made of others, which are given up where the others have been: looked for whenever twice as
// many are held as after the last look.
template <class Key, class Spec = engine::DomainSpecPtr>
class Cache {
 public:
  // The spec for `key`, null at first.
  template <class IsOld>
  Spec& At(const Key& key, const IsOld& is_old) {
    if (specs_.size() > limit_) {
      for (auto at = specs_.begin(); at != specs_.end();)
        at = is_old(at->first) ? specs_.erase(at) : std::next(at);
      limit_ = std::max(kLeast, 2 * specs_.size());
    }
    return specs_[key];
  }

 private:
  static constexpr size_t kLeast = 1024;
  std::map<Key, Spec> specs_;
  size_t limit_ = kLeast;
};

}  // namespace

std::string DomainOf(const std::string& key) { return key.substr(0, key.rfind('#')); }

bool IsOfSession(const std::string& key) { return key[key.rfind('#') + 1] == 's'; }
bool IsOfEager(const std::string& key) { return key[key.rfind('#') + 1] == 'e'; }

engine::DomainSpecPtr SpecFor(const std::string& key, const std::string& suffix) {
  // Kept: TensorFlow's threads outlive static destructors.
  static auto* mutex = new std::mutex;
  static auto* specs = new Cache<std::pair<std::string, std::string>, NamedSpec>;
  engine::DomainSpecPtr registered = engine::FindSpec(key);
  if (registered == nullptr)
    throw Error(Kind::kInternal,
                "nothing is known of the domain '" + key +
                    "': was this graph traced by another process and loaded here?");
  std::lock_guard<std::mutex> lock(*mutex);
  NamedSpec& spec = specs->At(
      {key, suffix}, [](const auto& other) { return engine::FindSpec(other.first) == nullptr; });
  if (spec.registered != registered) spec = {registered, Named(*registered, suffix)};
  return spec.named;
}

engine::DomainSpecPtr WithShapes(const engine::DomainSpecPtr& spec,
                                 const std::vector<engine::Shape>& shapes) {
  static auto* mutex = new std::mutex;
  static auto* last = new Cache<engine::DomainSpecPtr>;
  std::lock_guard<std::mutex> lock(*mutex);
  engine::DomainSpecPtr& recent =
      last->At(spec, [](const auto& other) { return other.use_count() == 1; });
  bool same = recent != nullptr;
  for (size_t i = 0; same && i < shapes.size(); ++i) same = recent->entries[i].shape == shapes[i];
  if (same) return recent;
  auto filled = std::make_shared<engine::DomainSpec>(*spec);
  filled->plan = nullptr;
  filled->varies = true;
  for (size_t i = 0; i < shapes.size(); ++i) filled->entries[i].shape = shapes[i];
  return recent = std::move(filled);
}

void CheckFits(const engine::DomainSpec& spec, int position, DType dtype,
               const engine::Shape& shape) {
  if (position < 0 || position >= static_cast<int>(spec.entries.size()))
    throw Error(Kind::kInternal, "'" + spec.name + "' has no position " + std::to_string(position));
  const engine::EntrySpec& entry = spec.entries[position];
  if (dtype == entry.dtype && Fits(entry.shape, shape)) return;
  throw Error(Kind::kInvalidArgument, std::string(engine::OpName(entry.op)) + " of '" +
                                          entry.label + "' (position " + std::to_string(position) +
                                          " of '" + spec.name + "'): expected " +
                                          DTypeName(entry.dtype) + " " + Text(entry.shape) +
                                          ", got " + DTypeName(dtype) + " " + Text(shape));
}

}  // namespace gradred::tf
