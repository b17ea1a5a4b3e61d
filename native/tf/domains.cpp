#include "domains.h"

#include <utility>

#include "base/digest.h"

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

}  // namespace

int64_t Arrangement::Digest() const {
  std::string text;
  for (int position : order) text += std::to_string(position) + ",";
  for (int end : group_ends) text += "|" + std::to_string(end);
  return static_cast<int64_t>(DigestOf(text, 0).lo >> 1);
}

namespace {

// Kept: TensorFlow's threads outlive static destructors.
std::mutex& RegistryMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<std::string, ArrangementPtr>& Proposals() {
  static auto* proposals = new std::map<std::string, ArrangementPtr>;
  return *proposals;
}

engine::DomainSpecPtr Named(const std::string& key, const std::string& suffix) {
  const engine::DomainSpecPtr registered = engine::FindSpec(key);
  if (registered == nullptr)
    throw Error(Kind::kInternal,
                "nothing is known of the domain '" + key +
                    "': was this graph traced by another process and loaded here?");
  auto named = std::make_shared<engine::DomainSpec>(*registered);
  named->plan = nullptr;
  named->name = key.substr(0, key.rfind('#')) + suffix;
  return named;
}

// The entry in which the ranks compare their proposals.
engine::EntrySpec ComparisonEntry() {
  engine::EntrySpec entry;
  entry.label = "(order of the gradients)";
  entry.reduce_op = reduce::ReduceOp::kMin;
  entry.dtype = entry.wire = DType::kInt64;
  entry.shape = {2};
  return entry;
}

}  // namespace

void Propose(const std::string& key, ArrangementPtr arrangement) {
  std::lock_guard<std::mutex> lock(RegistryMutex());
  Proposals()[key] = std::move(arrangement);
}

Domain& Domain::For(const std::string& key, const std::string& suffix) {
  using Key = std::pair<std::string, std::string>;
  static auto* domains = new std::map<Key, std::unique_ptr<Domain>>;
  static auto* decisions = new std::map<std::pair<std::string, size_t>, Decision>;
  std::lock_guard<std::mutex> lock(RegistryMutex());
  std::unique_ptr<Domain>& domain = (*domains)[{key, suffix}];
  if (domain == nullptr) {
    engine::DomainSpecPtr spec = Named(key, suffix);
    const auto proposal = Proposals().find(key);
    Decision* decision = &(*decisions)[{spec->name, spec->entries.size()}];
    domain.reset(new Domain(std::move(spec),
                            proposal == Proposals().end() ? nullptr : proposal->second, decision));
  }
  return *domain;
}

void Domain::Choose(const std::shared_ptr<engine::Engine>& engine,
                    std::function<void(Choice)> chosen) {
  if (proposal_ == nullptr) return chosen({});
  Choice choice;
  {
    std::lock_guard<std::mutex> lock(decision_->mutex);
    if (decision_->engine.lock() != engine) {
      decision_->engine = engine;
      decision_->state = State::kUndecided;
      decision_->waiting.clear();
    }
    switch (decision_->state) {
      case State::kDeciding:
        decision_->waiting.emplace_back(proposal_, std::move(chosen));
        return;
      case State::kUndecided:
        decision_->state = State::kDeciding;
        decision_->proposed = proposal_;
        choice = {Form::kDeciding, proposal_};
        break;
      case State::kDecided:
        if (decision_->arrangement) choice = {Form::kArranged, decision_->arrangement};
        break;
    }
  }
  chosen(choice);
}

void Domain::Decide(const Status& status, bool equal) {
  // State changes when nobody waits any more, so that batches that begin meanwhile come after those
  // that waited.
  Choice choice;
  for (;;) {
    std::function<void(Choice)> chosen;
    {
      std::lock_guard<std::mutex> lock(decision_->mutex);
      if (status.ok() && equal) choice = {Form::kArranged, decision_->proposed};
      if (decision_->waiting.empty()) {
        decision_->state = status.ok() ? State::kDecided : State::kUndecided;
        decision_->arrangement = choice.arrangement;
        break;
      }
      if (!status.ok()) {  // the next one decides
        decision_->proposed = decision_->waiting.front().first;
        choice = {Form::kDeciding, decision_->proposed};
      }
      chosen = std::move(decision_->waiting.front().second);
      decision_->waiting.pop_front();
    }
    chosen(choice);
    if (choice.form == Form::kDeciding) return;
  }
  if (!status.ok() || !spec_->complete()) return;
  engine::RegisterSpec(SpecFor(choice, {}));  // what gradred.plan() prints
}

engine::DomainSpecPtr Domain::SpecFor(const Choice& choice,
                                      const std::vector<engine::Shape>& shapes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Cached& cached = cache_[choice.form];
  const bool complete = spec_->complete();
  if (cached.spec != nullptr && cached.arrangement == choice.arrangement &&
      (complete || cached.shapes == shapes))
    return cached.spec;
  auto spec = std::make_shared<engine::DomainSpec>(*spec_);
  spec->plan = nullptr;
  if (!complete)
    for (size_t i = 0; i < shapes.size(); ++i) spec->entries[i].shape = shapes[i];
  if (choice.form == Form::kArranged) {
    std::vector<engine::EntrySpec> entries;
    for (int position : choice.arrangement->order) entries.push_back(spec->entries[position]);
    spec->entries = std::move(entries);
    spec->group_ends = choice.arrangement->group_ends;
  } else if (choice.form == Form::kDeciding) {
    if (spec->group_ends.empty()) spec->group_ends = {static_cast<int>(spec->entries.size())};
    spec->entries.push_back(ComparisonEntry());
    spec->group_ends.push_back(static_cast<int>(spec->entries.size()));
  }
  cached = {choice.arrangement, shapes, std::move(spec)};
  return cached.spec;
}

engine::DomainSpecPtr WithShapes(const engine::DomainSpecPtr& spec,
                                 const std::vector<engine::Shape>& shapes,
                                 const engine::DomainSpecPtr& recent) {
  bool same = recent != nullptr;
  for (size_t i = 0; same && i < shapes.size(); ++i) same = recent->entries[i].shape == shapes[i];
  if (same) return recent;
  auto filled = std::make_shared<engine::DomainSpec>(*spec);
  filled->plan = nullptr;
  for (size_t i = 0; i < shapes.size(); ++i) filled->entries[i].shape = shapes[i];
  return filled;
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
