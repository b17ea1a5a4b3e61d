#include "engine/control_loop.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/page_pool.h"
#include "base/timeline.h"
#include "engine/cores.h"

namespace gradred::engine {
namespace {

constexpr Nanos kWatchEvery = kLongestSleep;  // side channel and liveness, even when all sleep
constexpr Nanos kWatchAnswers = 20 * kMillisecond;  // while a question about a stall is out
constexpr Nanos kGatherCauses = 100 * kMillisecond;
constexpr Nanos kFlushNotices = 2 * kWatchEvery;

}  // namespace

ControlLoop::ControlLoop(comm::World& world, const EngineOptions& options, DataLoop* data,
                         std::shared_ptr<Completions> completions,
                         std::shared_ptr<MetricsStore> metrics)
    : Loop(world.control(), std::move(completions),
           options.thread_core >= 0 || ThreadsSpin(world.topology())),
      world_(world),
      options_(options),
      data_(data),
      metrics_(std::move(metrics)),
      side_(world.side()),
      stalls_(world.topology().rank, options.stall_warn, options.stall_fail, &side_),
      elsewhere_(world.topology().rank, &side_, [this](const DomainSpecPtr& spec) {
        return std::make_shared<Batch>(spec, PlanOf(*spec), std::vector<SlotPtr>{}, completions_,
                                       metrics_);
      }) {
  std::vector<int> all(world.topology().size);
  for (int r = 0; r < world.topology().size; ++r) all[r] = r;
  data_->AddSet(0, 0, all);
  sets_.push_back(std::make_unique<SetControl>(0, 0, std::move(all), world_,
                                               options_.negotiation_timer, data_));
  thread_ = std::thread([this] {
    BindThread(options_.thread_core);
    Run();
  });
}

void ControlLoop::JoinThread() {
  if (thread_.joinable()) thread_.join();
}

void ControlLoop::Put(Command command) {
  std::lock_guard<std::mutex> lock(mutex_);
  inbox_.push_back(std::move(command));
  SetInboxFull(true);
}

void ControlLoop::AddSet(int id, int lane, std::vector<int> members) {
  data_->AddSet(id, lane, members);
  Post([this, id, lane, members] {
    sets_.push_back(
        std::make_unique<SetControl>(id, lane, members, world_, options_.negotiation_timer, data_));
  });
}

void ControlLoop::CloseSet(int id, const std::string& reason, std::function<void()> done) {
  Post([this, id, reason, done = std::move(done)] {
    if (SetControl* set = Find(id))
      set->Shutdown(reason, {Kind::kAbandoned, reason},
                    [this, id, done] { data_->WhenIdle(id, false, done); });
  });
}

void ControlLoop::DropSet(int id, std::function<void()> done) {
  Post([this, id, done = std::move(done)] {
    const auto at =
        std::find_if(sets_.begin(), sets_.end(), [id](const auto& set) { return set->id() == id; });
    dropped_.rounds += (*at)->counters().rounds;
    dropped_.empty_rounds += (*at)->counters().empty_rounds;
    dropped_.unions += (*at)->counters().unions;
    sets_.erase(at);
    data_->WhenIdle(id, true, done);
  });
}

SetControl* ControlLoop::Find(int set_id) {
  for (const auto& set : sets_)
    if (set->id() == set_id) return set.get();
  return nullptr;
}

// Commands that come too late find the failure; their batch gets it.
void ControlLoop::Open(BatchPtr batch) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) {
    const Status cause =
        failure_.ok() ? Status(Kind::kNotInitialized, "the engine has been shut down") : failure_;
    lock.unlock();
    batch->FailRest(cause);
    return;
  }
  inbox_.push_back([this, batch] {
    const int set_id = batch->spec().process_set;
    if (SetControl* set = Find(set_id)) return set->Open(batch);
    batch->FailRest(
        {Kind::kAbandoned, "process set " + std::to_string(set_id) + " has been removed"});
  });
}

void ControlLoop::GroupReady(BatchPtr batch, int group) {
  Put([this, batch = std::move(batch), group] {
    if (SetControl* set = Find(batch->spec().process_set)) set->GroupReady(batch, group);
  });
}

void ControlLoop::Abandon(BatchPtr batch, std::string reason) {
  Post([this, batch = std::move(batch), reason = std::move(reason)] {
    if (SetControl* set = Find(batch->spec().process_set)) set->Abandon(batch, reason);
  });
}

void ControlLoop::Join(std::function<void(const Status&, int)> done) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) {
    const Status cause = failure_;
    lock.unlock();
    return done(cause.ok() ? Status(Kind::kNotInitialized, "the engine has been shut down") : cause,
                -1);
  }
  inbox_.push_back([this, done = std::move(done)] {
    // Whether two calls overlap is chance, so sharing one join would differ between ranks.
    if (!joined_.empty())
      return done({Kind::kInvalidArgument, "another thread of this rank waits in join"}, -1);
    joined_.push_back(done);
    Find(0)->Join([this](int last_rank) {
      const auto joined = std::move(joined_);
      joined_.clear();
      for (const auto& callback : joined) callback(Status(), last_rank);
    });
  });
  SetInboxFull(true);
  lock.unlock();
  Call();
}

void ControlLoop::Shutdown(std::string reason, std::function<void(const Status&)> done) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) {
    const Status cause = failure_;
    lock.unlock();
    return done(cause);
  }
  inbox_.push_back([this, reason = std::move(reason), done = std::move(done)] {
    shut_down_.push_back(done);
    if (shut_down_.size() > 1) return;
    for (const auto& set : sets_)
      set->Shutdown(reason, {Kind::kAbandoned, "this rank has shut down"});
  });
  SetInboxFull(true);
  lock.unlock();
  Call();
}

void ControlLoop::Fault(Status cause) {
  Post([this, cause = std::move(cause)] {
    OnNotice({world_.topology().rank, cause.kind(), cause.message()}, -1);
  });
}

Status ControlLoop::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool ControlLoop::RunCommands() {
  if (!HasInbox()) return false;
  std::vector<Command> commands;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    commands.swap(inbox_);
    SetInboxFull(false);
  }
  for (Command& command : commands) command();
  return !commands.empty();
}

void ControlLoop::OnNotice(const AbortNotice& notice, int lost_rank) {
  const bool mine = notice.origin == world_.topology().rank;
  if (mine && !faulty_) side_.Announce(notice, lost_rank);
  const auto rank_of = [](const AbortNotice& n) {
    return std::make_pair(n.kind != Kind::kPeerLost, n.origin);
  };
  if (faulty_ && rank_of(cause_) <= rank_of(notice)) return;
  cause_ = notice;
  if (!faulty_) cause_until_ = Now() + kGatherCauses;
  faulty_ = true;
}

void ControlLoop::Watch(Nanos now) {
  next_watch_ = now + (stalls_.awaits_answers() ? kWatchAnswers : kWatchEvery);
  side_.Poll({[this](const AbortNotice& notice) { OnNotice(notice, -1); },
              [this, now](const WhoLacks& question) { stalls_.OnQuestion(question, sets_, now); },
              [this](const ILack& answer) { stalls_.OnAnswer(answer); },
              [this](const WhoElsewhere& question) { elsewhere_.OnQuestion(question, sets_); },
              [this](const Elsewhere& answer) { elsewhere_.OnAnswer(answer, sets_); }});
  PagePool::The().Trim(now);
  if (faulty_) return;
  if (const std::optional<Status> lost = world_.CheckPeers())
    OnNotice({world_.topology().rank, lost->kind(), lost->message()}, -1);
  else if (const std::optional<Status> stalled = stalls_.Check(sets_, now))
    OnNotice({world_.topology().rank, stalled->kind(), stalled->message()}, -1);
  else
    elsewhere_.Check(sets_, now);
}

bool ControlLoop::AllShutDown() const {
  return std::all_of(sets_.begin(), sets_.end(), [](const auto& set) { return set->shut_down(); });
}

bool ControlLoop::AwaitsMessages() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& set) { return set->AwaitsMessages(); });
}

Nanos ControlLoop::NextWake() const {
  if (faulty_) return Now() + kMillisecond;
  if (AllShutDown()) return 0;
  Nanos next = next_watch_;
  for (const auto& set : sets_) next = std::min(next, set->NextWake());
  return next;
}

Nanos ControlLoop::ExpectedArrival() const {
  Nanos next = kForever;
  for (const auto& set : sets_) next = std::min(next, set->ExpectedArrival());
  return next == kForever ? 0 : next;
}

void ControlLoop::PublishCounters() {
  int64_t rounds = dropped_.rounds, empty = dropped_.empty_rounds, unions = dropped_.unions;
  for (const auto& set : sets_) {
    rounds += set->counters().rounds;
    empty += set->counters().empty_rounds;
    unions += set->counters().unions;
  }
  metrics_->Update([&](Metrics& m) {
    m.rounds = rounds;
    m.empty_rounds = empty;
    m.unions = unions;
  });
}

void ControlLoop::EndWaits(const Status& status) {
  const Status joined =
      status.ok() ? Status(Kind::kAbandoned, "this rank has shut down during its join") : status;
  for (const auto& callback : joined_) callback(joined, -1);
  for (const auto& callback : shut_down_) callback(status);
  joined_.clear();
  shut_down_.clear();
}

void ControlLoop::EndWith(const Status& cause) {
  timeline::Note("abort", cause.message());
  std::vector<Command> late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = cause;
    ended_ = true;
    late.swap(inbox_);
    SetInboxFull(false);
  }
  data_->StopWith(cause);
  // Batches opened in the last moment are in no queue yet: their commands put them there.
  for (Command& command : late) {
    try {
      command();
    } catch (const Error&) {
      // The negotiator may refuse events now; FailAll below ends what it has.
    }
  }
  for (const auto& set : sets_) {
    set->FailAll(cause);
    set->Leak();
  }
  EndWaits(cause);
  // Ranks of other machines look at the side channel a few times a second, and some get the notice
  // through this one.
  for (const Nanos until = Now() + kFlushNotices; Now() < until;) {
    side_.Poll({[](const AbortNotice&) {}, [](const WhoLacks&) {}, [](const ILack&) {},
                [](const WhoElsewhere&) {}, [](const Elsewhere&) {}});
    world_.side().bell().Sleep(world_.side().bell().Ticket(), 5 * kMillisecond);
  }
  world_.Abort(cause);
}

bool ControlLoop::Step() {
  bool moved = RunCommands();
  transport_.Progress();
  const Nanos now = Now();
  if (!faulty_)
    for (const auto& set : sets_) moved |= set->Poll(now);
  const bool watches = now >= next_watch_ || faulty_;
  if (watches) Watch(now);
  if (moved) PublishCounters();
  if (moved || watches) next_watch_ = std::min(next_watch_, stalls_.NextWake(sets_, now));
  return moved;
}

bool ControlLoop::Ended() {
  if (faulty_) return Now() >= cause_until_;
  if (!AllShutDown()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!inbox_.empty()) return false;
  ended_ = true;
  return true;
}

void ControlLoop::Run() {
  timeline::NameThread("control");
  try {
    Drive();
  } catch (...) {
    const Status status = CurrentException();
    OnNotice({world_.topology().rank, status.kind(), status.message()}, -1);
    while (Now() < cause_until_) {  // so that the notice leaves, and an earlier cause can come
      Watch(Now());
      world_.side().bell().Sleep(world_.side().bell().Ticket(), kMillisecond);
    }
  }
  if (faulty_) {
    EndWith(Status(cause_.kind, cause_.text));
  } else {
    for (const auto& set : sets_) set->FailAll({Kind::kAbandoned, "this rank has shut down"});
    data_->Stop();
    EndWaits(Status());
  }
}

}  // namespace gradred::engine
