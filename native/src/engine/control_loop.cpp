#include "engine/control_loop.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/page_pool.h"
#include "base/text.h"
#include "base/timeline.h"
#include "engine/cores.h"

namespace gradred::engine {
namespace {

constexpr Nanos kWatchEvery = kLongestSleep;  // side channel and liveness, even when all sleep
constexpr Nanos kWatchAnswers = 20 * kMillisecond;  // while a question about a stall is out
constexpr Nanos kGatherCauses = 100 * kMillisecond;
constexpr Nanos kFlushNotices = 2 * kWatchEvery;

// Note [Who hears of a loss]
// A rank that sees a fault tells all, by a tree that leaves out the ranks that are gone as far as
// it knows: it sees those of its own machine. A tree may still lead through a rank that another
// machine has lost at the same time. So each rank that has told something tells it again, by a tree
// of its own, when it hears of more that are gone; it does so until it leaves.
// All keep one cause: of what comes within a short time of the first notice, a lost peer before its
// consequences, then the lowest rank.

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
      stalls_(world.topology().rank, options.stall_warn, options.stall_fail, &side_) {
  std::vector<int> all(world.topology().size);
  for (int r = 0; r < world.topology().size; ++r) all[r] = r;
  data_->AddSet(0, 0, all);
  sets_.push_back(std::make_unique<SetControl>(0, 0, std::move(all), world_, data_));
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
    sets_.push_back(std::make_unique<SetControl>(id, lane, members, world_, data_));
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
  Post([this, cause = std::move(cause)] { OnFault(cause); });
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

// The side channel is given up when it throws: what it is to tell of may be the reason.
void ControlLoop::UseSide(const std::function<void()>& use) {
  if (!side_failure_.ok()) return;
  try {
    use();
  } catch (...) {
    side_failure_ = CurrentException();
    Log(LogLevel::kWarning, "rank " + std::to_string(world_.topology().rank) +
                                " cannot reach the others any more: " + side_failure_.message());
  }
}

// See Note [Who hears of a loss].
void ControlLoop::OnNotice(AbortNotice notice) {
  notice.text = Shortened(std::move(notice.text), kLongestNotice);  // the same text on all ranks
  const size_t known = lost_.size();
  lost_.insert(notice.lost.begin(), notice.lost.end());
  const bool mine = notice.origin == world_.topology().rank;
  const auto rank_of = [](const AbortNotice& n) {
    return std::make_pair(n.kind != Kind::kPeerLost, n.origin);
  };
  const bool adopted = !faulty_ || (Now() < cause_until_ && rank_of(notice) < rank_of(cause_));
  if (!faulty_) cause_until_ = Now() + kGatherCauses;
  faulty_ = true;
  if (adopted) cause_ = std::move(notice);
  cause_.lost = lost_;
  const bool tells = (mine && adopted) || (announced_ && lost_.size() > known);
  if (!tells) return;
  announced_ = true;
  UseSide([this] { side_.Announce(cause_); });
}

void ControlLoop::OnFault(const Status& fault) {
  LookForLost();  // before its consequences
  OnNotice({world_.topology().rank, fault.kind(), fault.message(), {}});
}

void ControlLoop::LookForLost() {
  const std::optional<comm::LostPeers> lost = world_.CheckPeers();
  if (!lost) return;
  // Once there is a cause, ranks leave with it, and have told it.
  const std::vector<int>& gone = faulty_ ? lost->silent : lost->ranks;
  const std::set<int> ranks(gone.begin(), gone.end());
  if (std::includes(lost_.begin(), lost_.end(), ranks.begin(), ranks.end())) return;
  AbortNotice notice{world_.topology().rank, lost->status.kind(), lost->status.message(), ranks};
  if (faulty_ && (cause_.kind == Kind::kPeerLost || Now() >= cause_until_)) {
    notice = cause_;  // stays, and is told to all again
    notice.lost = ranks;
    announced_ = true;
  }
  OnNotice(std::move(notice));
}

void ControlLoop::Watch(Nanos now) {
  next_watch_ = now + (stalls_.awaits_answers() ? kWatchAnswers : kWatchEvery);
  UseSide([this, now] {
    side_.Poll({[this](const AbortNotice& notice) { OnNotice(notice); },
                [this, now](const WhoLacks& question) { stalls_.OnQuestion(question, sets_, now); },
                [this](const ILack& answer) { stalls_.OnAnswer(answer); }});
  });
  PagePool::The().Trim(now);
  LookForLost();
  if (faulty_) return;
  if (!side_failure_.ok())
    OnFault(side_failure_);
  else if (const std::optional<Status> stalled = stalls_.Check(sets_, now))
    OnFault(*stalled);
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
    } catch (...) {
      // The negotiator may refuse events now; FailAll below ends what it has.
    }
  }
  for (const auto& set : sets_) {
    set->FailAll(cause);
    set->Leak();
  }
  EndWaits(cause);
  // Ranks of other machines look at the side channel a few times a second, and some get the notice
  // through this one, or because it tells again.
  for (const Nanos until = Now() + kFlushNotices; Now() < until;) {
    UseSide([this] {
      side_.Poll({[this](const AbortNotice& notice) { OnNotice(notice); }, [](const WhoLacks&) {},
                  [](const ILack&) {}});
    });
    LookForLost();
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
    OnFault(CurrentException());
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
