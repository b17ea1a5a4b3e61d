// The loop that moves tensors: one queue of agreed groups for each process set, the heads of all of
// them advanced in turn.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/world.h"
#include "engine/group_run.h"
#include "engine/loop.h"

namespace gradred::engine {

class DataLoop final : public Loop {
 public:
  // `fail` is called on the loop's thread with what ends the engine.
  DataLoop(comm::World& world, Nanos transport_timeout, std::shared_ptr<Completions> completions,
           MetricsStore* metrics, SlotTable* slots, int core,
           std::function<void(const Status&)> fail);
  ~DataLoop() override;
  void JoinThread();  // after Stop or StopWith

  // Any thread. The set's members are given once, before its first item.
  void AddSet(int set_id, int lane, std::vector<int> members);
  // `done` runs once nothing of the set is queued or under way, by whoever steps the loop; not
  // after the loop has ended. `drop`: its communicator and memory are gone then.
  void WhenIdle(int set_id, bool drop, std::function<void()> done);
  // Whoever posts then steps the loop, or has it served.
  void Post(RunItem item);
  // If something was posted: runs it here if it is small and comes through at once, else leaves it
  // to the thread.
  void Serve();
  // Ends the thread after what is queued (clean), or at once with everything queued failed by
  // `cause`.
  void Stop();
  void StopWith(const Status& cause);

 private:
  struct Running {
    std::unique_ptr<GroupRun> run;
    BatchPtr batch;  // null: this rank has joined
    int group = 0;
    std::string domain;
    bool alone = false;  // no other runs meanwhile
  };
  struct Set {
    int lane = 0;
    std::vector<int> members;
    std::unique_ptr<SetData> data;  // made by the loop on first use
    std::deque<RunItem> queue;
    std::vector<Running> running;  // in the order of the queue
    Nanos ended = 0;               // the last one that did
  };

  // Who waits for a set that is idle.
  struct Waiter {
    int set_id;
    bool drop;
    std::function<void()> done;
  };

  void Run();
  bool Step() override;
  bool AwaitsMessages() const override;
  Nanos NextWake() const override { return kForever; }
  bool Ended() override;
  bool Hurried() const override;
  bool TakeInbox();
  bool EndWaits();
  bool Advance(int id, Set* set);
  bool MayBegin(const Set& set) const;
  void Begin(int id, Set* set);
  void End(Set* set, const Running& running);
  void CheckMoves(int id, const Set& set);
  void FailAll(const Status& cause);

  comm::World& world_;
  const Nanos transport_timeout_;
  MetricsStore* const metrics_;
  SlotTable* const slots_;
  const std::function<void(const Status&)> fail_;
  std::mutex mutex_;
  std::vector<RunItem> inbox_;
  std::atomic<bool> inbox_large_{false};
  std::vector<std::pair<int, Set>> new_sets_;
  std::vector<Waiter> new_waiters_;
  bool stopping_ = false;
  Status cause_;
  std::map<int, Set> sets_;
  std::vector<Waiter> waiters_;
  int64_t moved_nbytes_ = 0;  // of the transport, when seen last
  Nanos moved_at_ = 0;        // when it was seen to grow
  std::thread thread_;
};

}  // namespace gradred::engine
