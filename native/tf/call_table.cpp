#include "call_table.h"

#include <atomic>
#include <utility>

#include "domains.h"

namespace gradred::tf {
namespace {

constexpr char kStepFailed[] = "the step failed on this rank before all its gradients were ready";
constexpr char kBegunAgain[] =
    "its graph began again on this rank before all gradients were ready: the step failed, or two "
    "threads run one function";

// Iterations of a loop overlap, and ranks may reach them in different orders: each is a domain of
// its own, of which 32 can be under way at once (TensorFlow's default is 10).
constexpr int64_t kLoopDomains = 32;

// How long a Wait moves the engine on before it leaves that to the engine's threads.
constexpr Nanos kStepWaiting = 200 * kMicrosecond;

std::atomic<int> waiting_calls{0};

std::string SuffixOf(const CallKey& key) {
  const std::string instance = key.instance == 0 ? "" : "+" + std::to_string(key.instance);
  if (key.iteration == 0) return instance;
  return instance + "@" + std::to_string(key.iteration % kLoopDomains);
}

}  // namespace

Call::Call(int64_t id, CallKey key)
    : id_(id),
      key_(std::move(key)),
      spec_(SpecFor(key_.domain, SuffixOf(key_))),
      engine_(engine::Global()),
      members_(spec_->entries.size()),
      shapes_(members_.size()),
      missing_(static_cast<int>(members_.size())),
      unfinished_(missing_) {}

void Call::Begin() {
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  Ready ready;  // none: nothing has been submitted
  std::lock_guard<std::mutex> lock(mutex_);
  OpenIfReady(engine.get(), &ready);
  ThrowIfError(failure_);
}

engine::DomainSpecPtr Call::Spec() {
  return spec_->complete() ? spec_ : WithShapes(spec_, shapes_);
}

void Call::OpenIfReady(engine::Engine* engine, Ready* ready) {
  if (batch_ != nullptr || !failure_.ok()) return;
  if (missing_ > 0 && !spec_->complete()) return;
  try {
    if (engine == nullptr) throw Error(Kind::kNotInitialized, "the engine was shut down");
    batch_ = engine->Open(Spec());
  } catch (...) {
    failure_ = CurrentException();
    return;
  }
  for (int i = 0; i < size(); ++i)
    if (members_[i].submitted) ready->emplace_back(i, SubmissionOf(i));
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

void Call::Submit(int position, Staged staged, engine::Then then) {
  const engine::Shape shape = ShapeOf(staged.output.get());
  CheckFits(*spec_, position, DTypeOf(staged.output.get()), shape);
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  Ready ready;
  engine::OpenBatchPtr batch;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ThrowIfError(
        failure_);  // first: where it made a Submit fail, the call has been given up by that
    if (!abandoned_.empty()) throw Error(Kind::kAbandoned, abandoned_);
    members_[position].staged = std::move(staged);
    members_[position].submitted = true;
    shapes_[position] = shape;
    --missing_;
    if (batch_ != nullptr)
      ready.emplace_back(position, SubmissionOf(position));
    else
      OpenIfReady(engine.get(), &ready);
    ThrowIfError(failure_);
    batch = batch_;
  }
  if (engine == nullptr) throw Error(Kind::kNotInitialized, "the engine was shut down");
  for (auto& [at, submission] : ready) engine->Submit(batch, at, std::move(submission), then);
}

void Call::Wait(Waiter waiter, bool step) {
  Status failure;
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unfinished_ > 0 && (batch_ != nullptr || failure_.ok())) {
      waiters_.push_back(std::move(waiter));
      waiter = nullptr;
      first = !std::exchange(waited_for_, true);
      if (first) waiting_calls.fetch_add(1, std::memory_order_relaxed);
    }
    failure = failure_;
  }
  if (waiter) return waiter(failure);
  if (!first || !step) return;
  // The step has come to where it needs the results, so this thread is free. One of a call's, and
  // not for long: the graph may have other branches.
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  if (engine != nullptr) engine->StepUntil([this] { return Finished(); }, kStepWaiting);
}

bool Call::NoneWaits() { return waiting_calls.load(std::memory_order_relaxed) == 0; }

bool Call::Finished() {
  std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

SharedTensor Call::TakeReplacement(int position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(members_[position].replacement, nullptr);
}

int Call::present(int position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return members_[position].present;
}

void Call::Finish(int position, const engine::Result& result) {
  std::vector<Waiter> waiters;
  Staged staged;
  Status failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) failure_ = result.status;
    // Given back before consumers run: a buffer that only they refer to can be reused by them.
    staged = std::exchange(members_[position].staged, {});
    members_[position].present = result.present;
    if (staged.replaced) members_[position].replacement = std::move(staged.output);
    if (--unfinished_ == 0) {
      waiters.swap(waiters_);
      if (waited_for_) waiting_calls.fetch_sub(1, std::memory_order_relaxed);
    }
    failure = failure_;
  }
  staged = {};
  for (const Waiter& waiter : waiters) waiter(failure);
}

void Call::Abandon(const std::string& reason) {
  const std::shared_ptr<engine::Engine> engine = engine_.lock();
  engine::OpenBatchPtr batch;
  std::vector<Staged> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!abandoned_.empty()) return;
    abandoned_ = reason;
    if (batch_ == nullptr) {
      for (Member& member : members_) unused.push_back(std::exchange(member.staged, {}));
      OpenToAbandon(engine.get());
    }
    batch = batch_;
  }
  if (engine != nullptr && batch != nullptr) engine->Abandon(batch, reason);
}

// The others may be in this batch already, so it must exist here to be given up. Dimensions that
// never came are taken for 0.
void Call::OpenToAbandon(engine::Engine* engine) {
  if (engine == nullptr || !failure_.ok()) return;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    if (members_[i].submitted) continue;
    shapes_[i] = spec_->entries[i].shape;
    for (int64_t& d : shapes_[i]) d = d < 0 ? 0 : d;
  }
  try {
    batch_ = engine->Open(Spec());
  } catch (...) {
    failure_ = CurrentException();  // the engine has failed, which the others know
  }
}

CallTable& CallTable::The() {
  static auto* table = new CallTable;  // kept: TensorFlow drops tensors after static destructors
  return *table;
}

int64_t CallTable::Begin(const CallKey& key) {
  while (true) {
    CallPtr failed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = by_key_.find(key);
      if (found == by_key_.end()) {
        // Opened under the lock: the engine's batches come in the order of the calls.
        auto call = std::make_shared<Call>(++last_id_, key);
        call->Begin();
        calls_[call->id()] = {call};
        return by_key_[key] = call->id();
      }
      failed = calls_.at(found->second).call;
      by_key_.erase(found);
    }
    failed->Abandon(kBegunAgain);  // and look again: another thread may have opened one meanwhile
  }
}

CallTable::Open& CallTable::At(int64_t id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) throw Error(Kind::kInternal, "the call of a ticket is gone");
  return found->second;
}

CallPtr CallTable::AddTicket(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Open& open = At(id);
  ++open.tickets;
  return open.call;
}

CallPtr CallTable::Find(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  return At(id).call;
}

void CallTable::Join(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  Open& open = At(id);
  open.joined = true;
  const auto by_key = by_key_.find(open.call->key());
  if (by_key != by_key_.end() && by_key->second == id) by_key_.erase(by_key);
}

CallPtr CallTable::Take(int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CallPtr call = At(ticket).call;
  if (call->size() != 1)
    throw Error(Kind::kInternal, "'" + call->key().domain + "' has " +
                                     std::to_string(call->size()) + " tensors, expected one");
  Forget(ticket);
  return call;
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
