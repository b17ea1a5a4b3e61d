#include "call_table.h"

#include <utility>

#include "domains.h"

namespace gradred::tf {
namespace {

constexpr char kStepFailed[] = "the step failed on this rank before all its gradients were ready";

// Iterations of a loop overlap, and ranks may reach them in different orders: each is a domain of
// its own, of which 32 can be under way at once (TensorFlow's default is 10).
constexpr int64_t kLoopDomains = 32;

std::string SuffixOf(const CallKey& key) {
  return key.iteration == 0 ? "" : "@" + std::to_string(key.iteration % kLoopDomains);
}

// The shapes of a domain's last batch, so that equal steps share one spec.
engine::DomainSpecPtr* RecentOf(const engine::DomainSpecPtr& spec) {
  static auto* recent = new std::map<engine::DomainSpecPtr, engine::DomainSpecPtr>;
  return &(*recent)[spec];
}
std::mutex& RecentMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

}  // namespace

Call::Call(int64_t id, CallKey key)
    : id_(id),
      key_(std::move(key)),
      spec_(SpecFor(key_.domain, SuffixOf(key_))),
      engine_(engine::Global()),
      members_(spec_->entries.size()),
      shapes_(members_.size()),
      missing_(static_cast<int>(members_.size())) {
  if (spec_->complete()) batch_ = engine::Global()->Open(spec_);
}

engine::BatchPtr Call::OpenWithKnownShapes(engine::Engine& engine) {
  engine::DomainSpecPtr filled;
  {
    std::lock_guard<std::mutex> lock(RecentMutex());
    engine::DomainSpecPtr* recent = RecentOf(spec_);
    filled = *recent = WithShapes(spec_, shapes_, *recent);
  }
  return engine.Open(filled);
}

engine::Submission Call::SubmissionOf(int position) {
  const Staged& staged = members_[position].staged;
  engine::Submission submission;
  submission.absent = staged.absent;
  submission.output = DataOf(staged.output.get());
  submission.input = staged.absent  ? nullptr
                     : staged.input ? DataOf(staged.input.get())
                                    : submission.output;
  submission.done = [self = shared_from_this(), position](const engine::Result& result) {
    self->Finish(position, result);
  };
  return submission;
}

void Call::Submit(int position, Staged staged) {
  const engine::Shape shape = ShapeOf(staged.output.get());
  CheckFits(*spec_, position, DTypeOf(staged.output.get()), shape);
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  if (engine == nullptr)
    throw Error(Kind::kNotInitialized, "the engine was shut down in the middle of a step");

  std::vector<std::pair<int, engine::Submission>> ready;
  engine::BatchPtr batch;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (abandoned_) throw Error(Kind::kAbandoned, kStepFailed);
    members_[position].staged = std::move(staged);
    members_[position].submitted = true;
    shapes_[position] = shape;
    --missing_;
    if (batch_ != nullptr) {
      ready.emplace_back(position, SubmissionOf(position));
    } else if (missing_ == 0) {
      batch_ = OpenWithKnownShapes(*engine);
      for (int i = 0; i < size(); ++i) ready.emplace_back(i, SubmissionOf(i));
    }
    batch = batch_;
  }
  for (auto& [i, submission] : ready) engine->Submit(batch, i, std::move(submission));
}

void Call::Wait(int position, Waiter waiter) {
  engine::Result result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Member& member = members_.at(position);
    if (!member.submitted) {
      result.status = {Kind::kInternal, "a Wait without its Submit in '" + spec_->name + "'"};
    } else if (!member.done) {
      member.waiter = std::move(waiter);
      return;
    } else {
      result = member.result;
    }
  }
  waiter(result);
}

void Call::Finish(int position, const engine::Result& result) {
  Waiter waiter;
  Staged staged;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Member& member = members_[position];
    member.done = true;
    member.result = result;
    waiter = std::move(member.waiter);
    // Given back before the waiter lets consumers run: a buffer that only they refer to can be
    // reused by them.
    staged = std::move(member.staged);
    member.staged = {};
  }
  staged = {};
  if (waiter) waiter(result);
}

void Call::Abandon(const std::string& reason) {
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  engine::BatchPtr batch;
  std::vector<Staged> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (abandoned_) return;
    abandoned_ = true;
    if (batch_ == nullptr) {
      // The others may be in this batch already, so it must exist here to be given up. Shapes that
      // never came are those of the last batch, or empty.
      {
        std::lock_guard<std::mutex> recent_lock(RecentMutex());
        const engine::DomainSpecPtr recent = *RecentOf(spec_);
        for (size_t i = 0; i < shapes_.size(); ++i) {
          if (members_[i].submitted) continue;
          shapes_[i] = recent ? recent->entries[i].shape : spec_->entries[i].shape;
          for (int64_t& d : shapes_[i]) d = d < 0 ? 0 : d;
        }
      }
      try {
        if (engine != nullptr) batch_ = OpenWithKnownShapes(*engine);
      } catch (const Error&) {
        // The engine has failed, which the others know.
      }
      for (Member& member : members_) unused.push_back(std::exchange(member.staged, {}));
    }
    batch = batch_;
  }
  if (engine != nullptr && batch != nullptr) engine->Abandon(batch, reason);
}

CallTable& CallTable::The() {
  static auto* table = new CallTable;  // kept: TensorFlow drops tensors after static destructors
  return *table;
}

CallPtr CallTable::Claim(const CallKey& key, int position) {
  CallPtr old, call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_key_.find(key);
    if (found != by_key_.end()) {
      Open& open = calls_.at(found->second);
      if (open.claimed.insert(position).second) {
        ++open.tickets;
        return open.call;
      }
      old = open.call;
      by_key_.erase(found);
    }
  }
  if (old != nullptr) old->Abandon(kStepFailed);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_key_.find(key);  // another thread may have opened the call meanwhile
  if (found != by_key_.end()) {
    Open& open = calls_.at(found->second);
    if (open.claimed.insert(position).second) {
      ++open.tickets;
      return open.call;
    }
  }
  // Opened under the lock: the engine's batches come in the order of the calls.
  call = std::make_shared<Call>(++last_id_, key);
  Open& open = calls_[call->id()];
  open.call = call;
  open.claimed.insert(position);
  open.tickets = 1;
  by_key_[key] = call->id();
  return call;
}

CallPtr CallTable::Find(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) throw Error(Kind::kInternal, "the call of a ticket is gone");
  return found->second.call;
}

CallPtr CallTable::Join(const std::vector<int64_t>& tickets) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(tickets.at(0));
  if (found == calls_.end()) throw Error(Kind::kInternal, "the call of a ticket is gone");
  Open& open = found->second;
  for (int64_t ticket : tickets)
    if (ticket != tickets[0] || static_cast<int>(tickets.size()) != open.call->size())
      throw Error(Kind::kInternal, "the tickets of two calls of '" + open.call->key().domain +
                                       "' are mixed: one graph ran its reductions twice at once");
  open.joined = true;
  const auto by_key = by_key_.find(open.call->key());
  if (by_key != by_key_.end() && by_key->second == tickets[0]) by_key_.erase(by_key);
  return open.call;
}

void CallTable::DropTicket(int64_t id) {
  CallPtr given_up;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = calls_.find(id);
    if (found == calls_.end() || found->second.joined) return;
    given_up = found->second.call;
    // The call stays until its last ticket is gone: Submits of the failed step that come late
    // belong to it, not to the next.
    if (--found->second.tickets == 0) Forget(id);
  }
  given_up->Abandon(kStepFailed);
}

void CallTable::DropJoined(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Forget(id);
}

void CallTable::Forget(int64_t id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  const auto by_key = by_key_.find(found->second.call->key());
  if (by_key != by_key_.end() && by_key->second == id) by_key_.erase(by_key);
  calls_.erase(found);
}

}  // namespace gradred::tf
