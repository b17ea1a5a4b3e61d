#include "engine/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/forks.h"
#include "base/graveyard.h"
#include "base/page_pool.h"
#include "engine/completions.h"
#include "engine/control_loop.h"
#include "engine/cores.h"
#include "engine/data_loop.h"
#include "engine/plan_book.h"

namespace gradred::engine {
namespace {

using RanksPtr = std::shared_ptr<const std::vector<int>>;

// The last channels belong to the world.
constexpr int kMostSets = comm::kChannels / comm::kChannelsPerSet - 1;

// Of the control loop in a caller's hands: a round that the others have entered, and the next.
constexpr int kMostSteps = 8;
// How long a caller that waits goes on stepping when nothing moves. It keeps its core: a thread
// that gets it may keep it for milliseconds.
constexpr Nanos kPatience = 100 * kMicrosecond;
// Where ranks outnumber cores, it offers the core after each step, and time says nothing: the
// others need theirs. Then this many steps.
constexpr int kMostStill = 24;

// A value that one thread waits for and another gives.
template <class T>
class Promise {
 public:
  void Set(T value) {
    std::lock_guard<std::mutex> lock(mutex_);
    value_ = std::move(value);
    set_ = true;
    wake_.notify_all();
  }
  bool IsSet() {
    std::lock_guard<std::mutex> lock(mutex_);
    return set_;
  }
  T Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return set_; });
    return std::move(value_);
  }
  bool WaitFor(Nanos longest) {
    std::unique_lock<std::mutex> lock(mutex_);
    return wake_.wait_for(lock, std::chrono::nanoseconds(longest), [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool set_ = false;
  T value_{};
};

template <class Number>
std::string ToText(const std::vector<Number>& numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

}  // namespace

// Note [Removing a process set]
// No id is given twice, so that a graph that was traced with a set never runs on another. Channels
// are few and are used again (a set's lane), so nothing of a set may be on its way when they are:
//   1. all ranks of the world agree that the set goes; from here nobody opens a batch of it;
//   2. its members shut its negotiator down, by rounds of the set: batches that all have whole run,
//      others fail alike. Each waits until nothing is under way here;
//   3. all ranks agree again: now nothing is under way anywhere, and peers need no memory of ours;
//   4. its communicators and memory go.
class Engine::Impl final : public BatchRunner {
 public:
  Impl(std::shared_ptr<comm::World> world, EngineOptions options)
      : world_(std::move(world)),
        options_(options),
        slots_(options.slot_nbytes),
        data_(*world_, options.transport_timeout, completions_, metrics_.get(), &slots_,
              options.thread_core, [this](const Status& cause) { control_->Fault(cause); }),
        control_(std::make_unique<ControlLoop>(*world_, options, &data_, completions_, metrics_)),
        book_(std::make_shared<PlanBook>(
            this,
            PlanOptions{options.plan_batches, options.spare_core, CoresOfRank(world_->topology())},
            metrics_)) {
    std::vector<int> all(world_->topology().size);
    for (size_t r = 0; r < all.size(); ++r) all[r] = static_cast<int>(r);
    sets_[0] = {0, std::make_shared<const std::vector<int>>(std::move(all))};
  }

  ~Impl() override {
    if (!shut_down_)
      control_->Fault({Kind::kAbandoned, "rank " + std::to_string(world_->topology().rank) +
                                             " ended its engine without a shutdown"});
    control_->JoinThread();
    data_.JoinThread();
    const Status failure = Failure();
    book_->Close(failure.ok() ? Status(Kind::kNotInitialized, "the engine has been shut down")
                              : failure);
    completions_->Stop();
  }

  OpenBatchPtr Open(const DomainSpecPtr& spec) {
    if (!spec->complete())
      throw Error(Kind::kInvalidArgument,
                  "'" + spec->name + "' has an entry whose shape is not known");
    const RanksPtr ranks_of_set = SetRanks(spec->process_set);
    const std::vector<int>& ranks = *ranks_of_set;
    const int rank = world_->topology().rank;
    if (!std::binary_search(ranks.begin(), ranks.end(), rank))
      throw Error(Kind::kInvalidArgument,
                  "rank " + std::to_string(rank) + " is no member of process set " +
                      std::to_string(spec->process_set) + " with ranks " + ToText(ranks) +
                      " and cannot take part in '" + spec->name + "'");
    for (const EntrySpec& entry : spec->entries)
      if (entry.op == Op::kBroadcast && !std::binary_search(ranks.begin(), ranks.end(), entry.root))
        throw Error(Kind::kInvalidArgument,
                    "broadcast of '" + entry.label + "': root rank " + std::to_string(entry.root) +
                        " is not among the ranks " + ToText(ranks) + " of process set " +
                        std::to_string(spec->process_set));
    ThrowIfError(control_->failure());
    PlanOf(*spec);  // says what is wrong with it
    if (!options_.null) return book_->Open(spec, ranks.size() == 1);
    auto batch = std::make_shared<OpenBatch>(spec);
    batch->SetOpen(Make(spec), nullptr, nullptr);
    return batch;
  }

  void Submit(const OpenBatchPtr& batch, int position, Submission submission, Then then) {
    if (then == Then::kLeave || Completions::InCallback()) {
      if (Offer(batch, position, std::move(submission))) control_->Call();
      return;
    }
    Completions::Scope callbacks(completions_.get());
    if (!Offer(batch, position, std::move(submission)) || then == Then::kWait) return;
    {
      Loop::Session control(control_.get());
      if (!control) return;  // who has it looks into the inbox afterwards
      for (int i = 0; i < kMostSteps && control.Step(); ++i) {
      }
    }
    data_.Serve();
  }

  void StepUntil(const std::function<bool()>& done, Nanos longest) {
    if (options_.null || Completions::InCallback() || done()) return;
    Completions::Scope callbacks(completions_.get());
    StepBoth(done, longest, &callbacks);
    // Where another had the data loop, it may have let go of it before a step here posted to it.
    data_.Serve();
  }

  void StepBoth(const std::function<bool()>& done, Nanos longest, Completions::Scope* callbacks) {
    Loop::Session control(control_.get()), data(&data_);
    const Nanos start = Now();
    Nanos moved = start;
    int still = 0;  // steps since then
    for (Nanos now = start; now - start < longest; now = Now()) {
      if (crowded_ ? still > kMostStill : now - moved > kPatience) return;
      control.Retake();
      data.Retake();
      if (control.Step() | data.Step()) {
        moved = Now();
        still = 0;
      } else {
        ++still;
        if (crowded_) sched_yield();
      }
      if (!callbacks->empty()) {
        control.Release();
        data.Release();
        callbacks->Run();
      }
      if (done()) return;
    }
  }

  void Abandon(const OpenBatchPtr& batch, const std::string& reason) {
    if (!batch->KeepAbandon(reason)) Abandon(batch->batch(), reason);
  }

  // Of BatchRunner.
  BatchPtr Make(const DomainSpecPtr& spec) override {
    const std::shared_ptr<const Plan> plan = PlanOf(*spec);
    return std::make_shared<Batch>(
        spec, plan, slots_.Of(spec->process_set)->Find(spec->name, *plan), completions_, metrics_);
  }
  void Start(const BatchPtr& batch) override { control_->Open(batch); }
  void Submit(const BatchPtr& batch, int place, Submission submission) override {
    if (Offer(batch, place, std::move(submission))) control_->Call();
  }

  // True if a group became complete by it: the control loop has got the news, and the caller now
  // steps it or calls its thread.
  bool Offer(const OpenBatchPtr& batch, int position, Submission submission) {
    const DomainSpec& listed = *batch->listed();
    if (position < 0 || position >= static_cast<int>(listed.entries.size()))
      throw Error(Kind::kInvalidArgument, "position " + std::to_string(position) + " of '" +
                                              listed.name + "', which has " +
                                              std::to_string(listed.entries.size()) + " entries");
    CheckSubmission(listed, listed.entries[position], submission);
    if (batch->Keep(position, &submission)) return false;
    batch->NoteSubmitted(position);
    return Offer(batch->batch(), batch->PlaceOf(position), std::move(submission));
  }
  bool Offer(const BatchPtr& batch, int place, Submission submission) {
    const int group = batch->Submit(place, std::move(submission));
    if (group < 0) return false;
    if (options_.null) {
      RunNull(batch, group);
      return false;
    }
    control_->GroupReady(batch, group);
    return true;
  }
  void Abandon(const BatchPtr& batch, const std::string& reason) override {
    if (options_.null)
      batch->FailRest({Kind::kAbandoned, reason});
    else
      control_->Abandon(batch, reason);
  }

  int AddProcessSet(const std::vector<int>& ranks, Engine* engine) {
    const int size = world_->topology().size;
    if (ranks.empty() || !std::is_sorted(ranks.begin(), ranks.end()) ||
        std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end() || ranks.front() < 0 ||
        ranks.back() >= size)
      throw Error(Kind::kInvalidArgument, "a process set needs ascending ranks below " +
                                              std::to_string(size) + ", got " + ToText(ranks));
    // Rank 0 chooses, and tells with the agreement: in which order the threads of a rank come back
    // from it is chance, and so is which removals have ended by then.
    const bool chooses = world_->topology().rank == 0 || options_.null;
    NewSet made;
    if (chooses) made = ChooseSet();
    try {
      made = Agree("process_sets", "add process set " + ToText(ranks), kAdd,
                   {ranks.begin(), ranks.end()}, made, engine);
    } catch (...) {
      if (chooses) FreeLane(made.lane);
      throw;
    }
    if (made.id == 0)
      throw Error(Kind::kUnsupported,
                  "no more than " + std::to_string(kMostSets) + " process sets at a time");
    const int id = static_cast<int>(made.id), lane = static_cast<int>(made.lane);
    std::unique_lock<std::mutex> lock(sets_mutex_);
    if (!chooses) {
      // Its last set is gone on rank 0, and here as soon as the thread that removes it goes on.
      while (lanes_.count(lane) > 0) {
        lane_freed_.wait_for(lock, std::chrono::nanoseconds(kLongestSleep));
        lock.unlock();  // who shuts down may wait for those that look at the sets
        ThrowIfEnded("it added a process set");
        lock.lock();
      }
      lanes_.insert(lane);
    }
    next_set_ = std::max(next_set_, id + 1);
    sets_[id] = {lane, std::make_shared<const std::vector<int>>(ranks)};
    if (IsMember(ranks)) control_->AddSet(id, lane, ranks);
    return id;
  }

  // See Note [Removing a process set].
  void RemoveProcessSet(int id, Engine* engine) {
    if (id == 0) throw Error(Kind::kInvalidArgument, "the global process set cannot be removed");
    const RanksPtr ranks = SetRanks(id);
    const std::string what = "process set " + std::to_string(id) + " with ranks " + ToText(*ranks);
    Agree("process_sets", "remove " + what, kRemove, {id}, {}, engine);
    int lane;
    {
      std::lock_guard<std::mutex> lock(sets_mutex_);
      const auto at = sets_.find(id);
      if (at == sets_.end())  // another thread was first, on all ranks
        throw Error(Kind::kInvalidArgument, what + " has been removed");
      lane = at->second.lane;
      sets_.erase(at);
    }
    const bool mine = IsMember(*ranks) && !options_.null;
    if (mine)
      Await([&](std::function<void()> done) {
        control_->CloseSet(id, what + " has been removed", std::move(done));
      });
    // By a name of its own: what other threads add or remove meanwhile does not matter.
    Agree("process_sets/end " + std::to_string(id), "end of " + what, kEnd, {id}, {}, engine);
    if (mine) Await([&](std::function<void()> done) { control_->DropSet(id, std::move(done)); });
    book_->Drop(id, {Kind::kInvalidArgument, what + " has been removed"});
    slots_.Drop(id);
    FreeLane(lane);
  }

  RanksPtr SetRanks(int id) const {
    std::lock_guard<std::mutex> lock(sets_mutex_);
    const auto at = sets_.find(id);
    if (at != sets_.end()) return at->second.ranks;
    const bool was = id > 0 && id < next_set_;
    throw Error(Kind::kInvalidArgument,
                was ? "process set " + std::to_string(id) + " has been removed"
                    : "there is no process set " + std::to_string(id));
  }

  int Join() {
    Promise<std::pair<Status, int>> promise;
    const bool first = book_->Join([this, &promise] {
      control_->Join([this, &promise](const Status& status, int last_rank) {
        book_->Joined();
        promise.Set({status, last_rank});
      });
    });
    // Whether two calls overlap is chance, so sharing one join would differ between ranks.
    if (!first)
      throw Error(Kind::kInvalidArgument,
                  "join: rank " + std::to_string(world_->topology().rank) +
                      ": another thread waits in it; expected one call at a time");
    const auto [status, last_rank] = promise.Wait();
    ThrowIfError(status);
    return last_rank;
  }

  void Shutdown(const std::string& reason) {
    Promise<Status> promise;
    control_->Shutdown(reason, [&promise](const Status& status) { promise.Set(status); });
    const Status status = promise.Wait();
    ThrowIfError(status);
    std::lock_guard<std::mutex> lock(closing_);
    if (shut_down_) return;
    shut_down_ = true;
    control_->JoinThread();  // nothing uses the transports any more
    data_.JoinThread();
    world_->Close();
    PagePool::The().Release();
  }

  void Fault(const Status& cause) { control_->Fault(cause); }
  Status Failure() const { return control_->failure(); }

  const std::shared_ptr<comm::World> world_;
  const EngineOptions options_;
  const bool crowded_ = CoresOfRank(world_->topology()) < 1;
  const std::shared_ptr<MetricsStore> metrics_ = std::make_shared<MetricsStore>();
  const std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();
  SlotTable slots_;
  DataLoop data_;
  std::unique_ptr<ControlLoop> control_;
  const std::shared_ptr<PlanBook> book_;
  std::mutex closing_;
  bool shut_down_ = false;

 private:
  int SetSize(int id) const { return static_cast<int>(SetRanks(id)->size()); }
  bool IsMember(const std::vector<int>& ranks) const {
    return std::binary_search(ranks.begin(), ranks.end(), world_->topology().rank);
  }

  // What rank 0 gives a new process set; 0: there is no room for it.
  struct NewSet {
    int64_t id = 0, lane = 0;
  };
  NewSet ChooseSet() {
    std::lock_guard<std::mutex> lock(sets_mutex_);
    int lane = 1;
    while (lanes_.count(lane) > 0) ++lane;
    if (lane >= kMostSets) return {};
    lanes_.insert(lane);
    return {next_set_++, lane};
  }
  void FreeLane(int64_t lane) {
    std::lock_guard<std::mutex> lock(sets_mutex_);
    lanes_.erase(static_cast<int>(lane));
    lane_freed_.notify_all();
  }

  // All ranks of the world agree on what becomes of a process set, by a broadcast of nothing: its
  // dimensions carry what must be equal. Ranks that do different things under one name get a
  // Mismatch. Returns what rank 0 says of a new set. Only reductions are possible while a rank has
  // joined, so this is refused then.
  enum Change : int64_t { kAdd, kRemove, kEnd };
  NewSet Agree(const std::string& name, const std::string& label, Change change,
               std::vector<int64_t> values, NewSet made, Engine* engine) {
    auto spec = std::make_shared<DomainSpec>();
    spec->name = name;
    EntrySpec entry;
    entry.label = label;
    entry.op = Op::kBroadcast;
    entry.dtype = entry.wire = DType::kUint8;
    entry.shape = std::move(values);
    entry.shape.push_back(change);
    entry.shape.push_back(0);  // no elements, whatever the numbers are
    spec->entries.push_back(entry);
    static char nothing;
    std::vector<Submission> submissions(1);
    submissions[0].input = submissions[0].output = &nothing;
    auto said = std::make_unique<NewSet>(made);
    if (change == kAdd) {  // one group more, which may run in another round
      entry.label += ", what rank 0 says";
      entry.shape = {sizeof made};
      spec->entries.push_back(std::move(entry));
      submissions.emplace_back();
      submissions[1].input = submissions[1].output = said.get();
    }
    try {
      engine->RunBlocking(spec, std::move(submissions));
    } catch (...) {
      Bury(said);  // when the engine ends, it may still be written to
      throw;
    }
    return *said;
  }

  void ThrowIfEnded(const std::string& meanwhile) {
    ThrowIfError(Failure());
    std::lock_guard<std::mutex> lock(closing_);
    if (shut_down_) throw Error(Kind::kAbandoned, "this rank shut down while " + meanwhile);
  }

  // Waits for a `done` that does not come when the engine ends.
  template <class Start>
  void Await(Start start) {
    const auto promise = std::make_shared<Promise<bool>>();
    start([promise] { promise->Set(true); });
    while (!promise->WaitFor(kLongestSleep)) ThrowIfEnded("it removed a process set");
  }

  void CheckSubmission(const DomainSpec& spec, const EntrySpec& entry,
                       const Submission& submission) const {
    const auto refuse = [&](const std::string& why) {
      throw Error(Kind::kInvalidArgument, std::string(OpName(entry.op)) + " of '" + entry.label +
                                              "': rank " + std::to_string(world_->topology().rank) +
                                              " in process set " +
                                              std::to_string(spec.process_set) + ": " + why);
    };
    if (submission.absent && entry.op != Op::kAllReduce)
      refuse("cannot be absent; only an allreduce can");
    if (entry.op != Op::kAllToAll) return;
    const int64_t rows = entry.shape[0];
    const int size = SetSize(spec.process_set);
    if (!submission.splits) {
      if (rows % size != 0)
        refuse("expected splits, or a first dimension that is a multiple of " +
               std::to_string(size) + ", the number of ranks; got " + std::to_string(rows));
      return;
    }
    bool good = static_cast<int>(submission.splits->size()) == size;
    int64_t left = rows;
    for (int64_t n : *submission.splits) {
      good &= n >= 0 && n <= left;
      if (good) left -= n;
    }
    if (!good || left != 0)
      refuse("expected as splits " + std::to_string(size) +
             " numbers of rows from 0 with the sum " + std::to_string(rows) + ", got " +
             ToText(*submission.splits));
  }

  // GRADRED_NULL: what a job of one rank without scales would return.
  void RunNull(const BatchPtr& batch, int group) {
    const GroupPlan& plan = batch->plan().groups[group];
    batch->Start(group);
    std::vector<Submission*> members = batch->Take(group);
    std::vector<Result> results;
    for (int i = plan.first; i < plan.last; ++i) {
      const EntrySpec& entry = batch->spec().entries[i];
      Submission& member = *members[i - plan.first];
      Result result;
      result.shape = entry.shape;
      result.present = member.absent ? 0 : 1;
      if (entry.op == Op::kAllToAll) {
        const int size = SetSize(batch->spec().process_set);
        result.received_splits =
            member.splits.value_or(std::vector<int64_t>(size, entry.shape[0] / size));
      }
      void* output = member.output;
      if (!output && member.allocate) output = member.allocate(entry.shape);
      const int64_t nbytes = entry.op == Op::kBarrier ? 0 : entry.count() * DTypeSize(entry.dtype);
      if (output && nbytes > 0 && output != member.input) {
        if (member.input)
          std::memcpy(output, member.input, nbytes);
        else
          std::memset(output, 0, nbytes);
      }
      results.push_back(std::move(result));
    }
    batch->Finish(group, std::move(results));
  }

  mutable std::mutex sets_mutex_;
  struct Set {
    int lane;  // of its communicators
    RanksPtr ranks;
  };
  std::map<int, Set> sets_;
  std::set<int> lanes_;  // of sets, and of those that are being added or removed
  std::condition_variable lane_freed_;
  int next_set_ = 1;
};

Engine::Engine(std::unique_ptr<comm::World> world, EngineOptions options)
    : pid_(getpid()), forks_(Forks()) {
  const std::shared_ptr<comm::World> shared = std::move(world);
  try {
    impl_ = std::make_unique<Impl>(shared, options);
  } catch (...) {
    // The others have met this rank and have engines by now.
    const Status cause = CurrentException();
    shared->Abort({cause.kind(), "rank " + std::to_string(shared->topology().rank) +
                                     " could not start its engine: " + cause.message()});
    throw;
  }
}

Engine::~Engine() {
  if (InChild())
    (void)impl_.release();  // a forked child has none of the threads, and must not touch what the
                            // parent uses
}

bool Engine::InChild() const { return Forks() != forks_; }

void Engine::RefuseChild() const {
  if (InChild())
    throw Error(Kind::kNotInitialized,
                "this process was forked from one that uses gradred; the engine stays with the "
                "parent (pid " +
                    std::to_string(pid_) + ")");
}

Engine::Impl& Engine::Mine() const {
  RefuseChild();
  return *impl_;
}

const comm::Topology& Engine::topology() const { return impl_->world_->topology(); }
comm::World& Engine::world() { return *impl_->world_; }
OpenBatchPtr Engine::Open(const DomainSpecPtr& spec) { return Mine().Open(spec); }
void Engine::Submit(const OpenBatchPtr& batch, int position, Submission submission, Then then) {
  Mine().Submit(batch, position, std::move(submission), then);
}
void Engine::StepUntil(const std::function<bool()>& done, Nanos longest) {
  if (!InChild()) impl_->StepUntil(done, longest);
}
void Engine::Abandon(const OpenBatchPtr& batch, const std::string& reason) {
  if (!InChild()) impl_->Abandon(batch, reason);
}
int Engine::AddProcessSet(const std::vector<int>& ranks) {
  return Mine().AddProcessSet(ranks, this);
}
void Engine::RemoveProcessSet(int id) { Mine().RemoveProcessSet(id, this); }
std::vector<int> Engine::ProcessSetRanks(int id) const { return *Mine().SetRanks(id); }
int Engine::Join() { return Mine().Join(); }
void Engine::Shutdown(const std::string& reason) { Mine().Shutdown(reason); }
void Engine::Abort(const Status& cause) { Mine().Fault(cause); }
Status Engine::failure() const { return Mine().Failure(); }
Metrics Engine::metrics() const {
  Metrics metrics = Mine().metrics_->Read();
  const PagePool::Stats pool = PagePool::The().stats();
  metrics.pool_nbytes = pool.used_nbytes + pool.idle_nbytes;
  metrics.pool_fresh = pool.fresh;
  metrics.pool_reused = pool.reused;
  metrics.network_bytes = impl_->world_->network_nbytes();
  return metrics;
}

std::string Engine::DescribePlan(const std::string& domain) const {
  const DomainSpecPtr spec = FindSpec(domain);
  if (!spec)
    throw Error(Kind::kInvalidArgument, "no domain named '" + domain + "' has been registered");
  const DomainSpecPtr current = Mine().book_->Current(spec->process_set, domain);
  return Describe(current ? *current : *spec);
}

std::vector<PlanReport> Engine::PlanReports() const { return Mine().book_->Reports(); }

std::vector<Result> Engine::RunBlocking(const DomainSpecPtr& spec,
                                        std::vector<Submission> submissions) {
  if (submissions.size() != spec->entries.size())
    throw Error(Kind::kInvalidArgument,
                "'" + spec->name + "' has " + std::to_string(spec->entries.size()) +
                    " entries, got " + std::to_string(submissions.size()) + " tensors");
  struct Shared {
    Promise<bool> all;
    std::mutex mutex;
    size_t left;
    std::vector<Result> results;
  };
  auto shared = std::make_shared<Shared>();
  shared->left = submissions.size();
  shared->results.resize(submissions.size());
  const OpenBatchPtr batch = Open(spec);
  for (size_t i = 0; i < submissions.size(); ++i) {
    submissions[i].done = [shared, i](const Result& result) {
      std::unique_lock<std::mutex> lock(shared->mutex);
      shared->results[i] = result;
      const bool last = --shared->left == 0;
      lock.unlock();
      if (last) shared->all.Set(true);
    };
    Submit(batch, static_cast<int>(i), std::move(submissions[i]),
           i + 1 < submissions.size() ? Then::kStep : Then::kWait);
  }
  StepUntil([&] { return shared->all.IsSet(); });
  shared->all.Wait();
  for (const Result& result : shared->results) ThrowIfError(result.status);
  return std::move(shared->results);
}

}  // namespace gradred::engine
