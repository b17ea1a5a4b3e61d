// The loop that agrees with the other ranks: negotiators of all process sets, side channel,
// liveness, stalls.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/world.h"
#include "engine/data_loop.h"
#include "engine/engine.h"
#include "engine/loop.h"
#include "engine/set_control.h"
#include "engine/side_channel.h"
#include "engine/stall_watch.h"

namespace gradred::engine {

class ControlLoop final : public Loop {
 public:
  ControlLoop(comm::World& world, const EngineOptions& options, DataLoop* data,
              std::shared_ptr<Completions> completions, std::shared_ptr<MetricsStore> metrics);
  ~ControlLoop() override { JoinThread(); }
  void JoinThread();  // after Shutdown or Fault

  // Any thread; none waits. After a failure they do nothing but fail their batch.
  void AddSet(int id, int lane, std::vector<int> members);
  // Of a set that is removed, on each member. Its batches that are not whole fail with `reason`;
  // `done` runs when all members have closed it and nothing of it is under way here.
  void CloseSet(int id, const std::string& reason, std::function<void()> done);
  // When nothing of it is under way on any member. `done` runs when its memory is gone. No `done`
  // runs after a failure.
  void DropSet(int id, std::function<void()> done);
  // Wakes nobody: a batch is begun with its first complete group, or when the loop is stepped next.
  void Open(BatchPtr batch);
  // The caller then takes the loop and steps it, or calls the thread.
  void GroupReady(BatchPtr batch, int group);
  void Abandon(BatchPtr batch, std::string reason);
  // The callbacks run once, by whoever steps the loop.
  void Join(std::function<void(const Status&, int last_rank)> done);
  void Shutdown(std::string reason, std::function<void(const Status&)> done);
  void Fault(Status cause);  // ends the engine of every rank

  Status failure() const;

 private:
  using Command = std::function<void()>;
  void Put(Command command);
  void Post(Command command) {
    Put(std::move(command));
    Call();
  }
  void Run();
  bool RunCommands();
  bool Step() override;
  bool AwaitsMessages() const override;
  Nanos NextWake() const override;
  Nanos ExpectedArrival() const override;
  bool Ended() override;
  void AfterStep() override { data_->Serve(); }
  bool AllShutDown() const;
  void Watch(Nanos now);
  void OnNotice(AbortNotice notice);
  void OnFault(const Status& fault);  // of this rank
  void LookForLost();
  void UseSide(const std::function<void()>& use);
  void EndWith(const Status& cause);
  void EndWaits(const Status& status);
  SetControl* Find(int set_id);  // null when unknown
  void PublishCounters();

  comm::World& world_;
  const EngineOptions options_;
  DataLoop* const data_;
  const std::shared_ptr<MetricsStore> metrics_;
  SideChannel side_;
  StallWatch stalls_;
  std::vector<std::unique_ptr<SetControl>> sets_;
  core::NegotiatorCounters dropped_;  // of sets that are gone
  Nanos next_watch_ = 0;

  // See Note [Who hears of a loss].
  bool faulty_ = false;
  AbortNotice cause_;
  std::set<int> lost_;      // ranks that are gone, as far as is known here
  bool announced_ = false;  // something, by this rank
  Status side_failure_;     // what the side channel threw: it is not used any more
  Nanos cause_until_ = 0;

  // Who waits in a join, at most one, and in the shutdown: later callers share the first's.
  std::vector<std::function<void(const Status&, int)>> joined_;
  std::vector<std::function<void(const Status&)>> shut_down_;

  mutable std::mutex mutex_;
  std::vector<Command> inbox_;
  Status failure_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace gradred::engine
