#include "engine/data_loop.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/graveyard.h"
#include "base/timeline.h"
#include "engine/batch_times.h"
#include "engine/cores.h"

namespace gradred::engine {

namespace {
// Groups up to this size run in the thread that hears of their agreement: a hop to the data thread
// would cost more than the group.
constexpr int64_t kSmallNbytes = 32 << 10;
// How long that thread stays with it. The others have heard of it too, so their messages are near.
constexpr Nanos kServe = 20 * kMicrosecond;

// Note [Groups that run together]
// A group that is all of its batch, a tensor that was reduced by a call of its own, may run while
// others do, so that of a hundred such calls not each one waits for every rank's turn. They start
// in the order of the queue, each when the one before has given its works to the communicator, so
// that the communicator's calls have one order on all ranks. Groups of a plan run one after the
// other: their times are what the planner goes by.
constexpr size_t kMostTogether = 8;

bool RunsAlone(const RunItem& item) {
  const std::shared_ptr<const Plan> plan = PlanOf(*item.spec);
  return plan->groups.size() > 1 || !plan->groups[0].reduces;
}

bool IsSmall(const RunItem& item) {
  const GroupPlan& group = PlanOf(*item.spec)->groups[item.group];
  int64_t nbytes = 0;
  for (int i = group.first; i < group.last && nbytes <= kSmallNbytes; ++i) {
    const EntrySpec& entry = item.spec->entries[i];
    if (entry.op != Op::kBarrier) nbytes += entry.count() * DTypeSize(entry.dtype);
  }
  return nbytes <= kSmallNbytes;
}

}  // namespace

DataLoop::DataLoop(comm::World& world, Nanos transport_timeout,
                   std::shared_ptr<Completions> completions, MetricsStore* metrics,
                   SlotTable* slots, int core, std::function<void(const Status&)> fail)
    : Loop(world.data(), std::move(completions), core >= 0 || ThreadsSpin(world.topology())),
      world_(world),
      transport_timeout_(transport_timeout),
      metrics_(metrics),
      slots_(slots),
      fail_(std::move(fail)),
      thread_([this, core] {
        BindThread(core);
        Run();
      }) {}

DataLoop::~DataLoop() {
  Stop();
  JoinThread();
}

void DataLoop::JoinThread() {
  if (thread_.joinable()) thread_.join();
}

void DataLoop::AddSet(int set_id, int lane, std::vector<int> members) {
  Set set;
  set.lane = lane;
  set.members = std::move(members);
  std::lock_guard<std::mutex> lock(mutex_);
  new_sets_.emplace_back(set_id, std::move(set));
  SetInboxFull(true);
}

void DataLoop::WhenIdle(int set_id, bool drop, std::function<void()> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    new_waiters_.push_back({set_id, drop, std::move(done)});
    SetInboxFull(true);
  }
  Call();
}

void DataLoop::Post(RunItem item) {
  const bool large = !IsSmall(item);
  std::lock_guard<std::mutex> lock(mutex_);
  inbox_.push_back(std::move(item));
  if (large) inbox_large_ = true;
  SetInboxFull(true);
}

void DataLoop::Serve() {
  if (!HasInbox()) return;
  if (inbox_large_) return Call();
  Completions::Scope callbacks(completions_.get());
  Session session(this);
  if (!session) return;  // who has it looks into the inbox afterwards
  const Nanos start = Now();
  do {
    if (!session.Step()) sched_yield();
  } while ((session.AwaitsMessages() || HasInbox()) && Now() - start < kServe);
}

void DataLoop::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  Demand();
}

void DataLoop::StopWith(const Status& cause) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (cause_.ok()) cause_ = cause;
  }
  Demand();
}

bool DataLoop::TakeInbox() {
  if (!HasInbox()) return false;
  std::vector<RunItem> items;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, set] : new_sets_) sets_[id] = std::move(set);
    new_sets_.clear();
    for (Waiter& waiter : new_waiters_) waiters_.push_back(std::move(waiter));
    new_waiters_.clear();
    items.swap(inbox_);
    inbox_large_ = false;
    SetInboxFull(false);
  }
  for (RunItem& item : items) sets_[item.set_id].queue.push_back(std::move(item));
  return !items.empty();
}

bool DataLoop::EndWaits() {
  bool any = false;
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    const auto set = sets_.find(waiter->set_id);
    if (set != sets_.end() && (!set->second.running.empty() || !set->second.queue.empty())) {
      ++waiter;
      continue;
    }
    if (set != sets_.end() && waiter->drop) sets_.erase(set);
    waiter->done();
    waiter = waiters_.erase(waiter);
    any = true;
  }
  return any;
}

void DataLoop::Begin(int id, Set* set) {
  RunItem item = std::move(set->queue.front());
  set->queue.pop_front();
  if (!set->data) {
    set->data = std::make_unique<SetData>();
    set->data->members = set->members;
    set->data->communicator = world_.MakeData(set->members, set->lane);
    set->data->slots = slots_->Of(id);
  }
  if (item.someone_joined && !PlanOf(*item.spec)->groups[item.group].reduces) {
    // Known alike on all ranks: the round said that somebody has joined.
    const EntrySpec& entry = item.spec->entries[PlanOf(*item.spec)->groups[item.group].first];
    if (item.batch)
      item.batch->FailGroup(item.group,
                            {Kind::kInvalidArgument,
                             std::string(OpName(entry.op)) + " of '" + entry.label +
                                 "' is not possible while a rank has joined; only allreduces are"});
    return;
  }
  Running& running = set->running.emplace_back();
  running.batch = item.batch;
  running.group = item.group;
  running.domain = item.spec->name;
  running.alone = RunsAlone(item);
  running.run = StartGroup(std::move(item), set->data.get(), metrics_);
}

bool DataLoop::MayBegin(const Set& set) const {
  if (set.queue.empty()) return false;
  if (set.running.empty()) return true;
  const Running& last = set.running.back();
  const RunItem& next = set.queue.front();
  if (last.alone || !last.run->started_works() || set.running.size() >= kMostTogether ||
      RunsAlone(next))
    return false;
  // Batches of one domain share memory.
  return std::none_of(set.running.begin(), set.running.end(),
                      [&](const Running& running) { return running.domain == next.spec->name; });
}

void DataLoop::End(Set* set, const Running& running) {
  const Nanos end = Now();
  // Of groups that run together, each moment once.
  const double seconds = Seconds(end - std::max(running.run->started, set->ended));
  set->ended = end;
  if (running.batch && running.batch->times)
    running.batch->times->GroupRan(running.group, running.run->started, end);
  metrics_->Update([seconds](Metrics& m) { m.communication_s += seconds; });
}

bool DataLoop::Advance(int id, Set* set) {
  bool moved = false;
  while (MayBegin(*set)) {
    Begin(id, set);
    moved = true;
  }
  for (auto running = set->running.begin(); running != set->running.end();) {
    if (running->run->Poll()) {
      End(set, *running);
      running = set->running.erase(running);
      moved = true;
    } else {
      ++running;
    }
  }
  if (!moved && !set->running.empty()) CheckMoves(id, *set);
  return moved;
}

void DataLoop::CheckMoves(int id, const Set& set) {
  const GroupRun& oldest = *set.running.front().run;
  const Nanos now = Now();
  if (const int64_t nbytes = transport_.moved_nbytes(); nbytes != moved_nbytes_) {
    moved_nbytes_ = nbytes;
    moved_at_ = now;
  }
  const Nanos still = now - std::max(oldest.started, moved_at_);
  if (still > transport_timeout_)
    throw Error(Kind::kTransportError, "a group of " + std::to_string(oldest.nbytes) +
                                           " bytes that all ranks agreed to reduce (process set " +
                                           std::to_string(id) + ") is not finished, and nothing " +
                                           "has moved for " + std::to_string(still / kSecond) +
                                           " s");
}

void DataLoop::FailAll(const Status& cause) {
  for (auto& [id, set] : sets_) {
    for (const Running& running : set.running)
      if (running.batch) running.batch->FailGroup(running.group, cause);
    for (RunItem& item : set.queue)
      if (item.batch) item.batch->FailGroup(item.group, cause);
    set.queue.clear();
    if (set.running.empty()) continue;
    // Their memory may still be in use by the transport or by peers: it is never freed.
    for (Running& running : set.running) Bury(running.run);
    set.running.clear();
    Bury(set.data);
  }
}

bool DataLoop::Step() {
  bool moved = TakeInbox();
  transport_.Progress();
  for (auto& [id, set] : sets_) moved |= Advance(id, &set);
  if (!waiters_.empty()) moved |= EndWaits();
  return moved;
}

bool DataLoop::AwaitsMessages() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& entry) {
    return !entry.second.running.empty() || !entry.second.queue.empty();
  });
}

bool DataLoop::Hurried() const { return AwaitsMessages() || HasInbox(); }

bool DataLoop::Ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  ThrowIfError(cause_);
  return stopping_ && inbox_.empty() && new_waiters_.empty() && !AwaitsMessages();
}

void DataLoop::Run() {
  timeline::NameThread("data");
  try {
    Drive();
    for (auto& [id, set] : sets_) set.data.reset();
  } catch (...) {
    const Status status = CurrentException();
    Status cause;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      cause = cause_;
    }
    if (cause.ok()) fail_(status);
    // The engine agrees on the first cause before it tells anybody: wait for it.
    for (int i = 0; i < 40 && cause.ok(); ++i) {
      transport_.bell().Sleep(transport_.bell().Ticket(), 50 * kMillisecond);
      std::lock_guard<std::mutex> lock(mutex_);
      cause = cause_;
    }
    TakeInbox();
    FailAll(cause.ok() ? status : cause);
    std::lock_guard<std::mutex> lock(mutex_);
    inbox_.clear();
  }
}

}  // namespace gradred::engine
