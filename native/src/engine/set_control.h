// The control side of one process set: feeds its negotiator and performs what it asks. Belongs to
// whoever steps the control loop.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/timeline.h"
#include "comm/world.h"
#include "core/negotiator.h"
#include "engine/batch.h"
#include "engine/data_loop.h"

namespace gradred::engine {

class SetControl {
 public:
  SetControl(int id, int lane, std::vector<int> members, comm::World& world, DataLoop* data);

  void Open(const BatchPtr& batch);
  void GroupReady(const BatchPtr& batch, int group);
  void Abandon(const BatchPtr& batch, const std::string& reason,
               Kind kind = Kind::kAbandoned);  // as core::Abandon
  void Join(std::function<void(int last_rank)> done);
  // Once; later ones do nothing. `closed`: what batches of this rank end with from here. `done`
  // runs when all members have shut down, and may be null.
  void Shutdown(const std::string& reason, const Status& closed,
                std::function<void()> done = nullptr);

  // Polls the round or union in progress and the timer. True if something happened. Throws what
  // ends the engine.
  bool Poll(Nanos now);
  Nanos NextWake() const { return negotiator_.NextWake(); }
  // A round or union is on its way.
  bool AwaitsMessages() const { return round_ != nullptr || union_ != nullptr; }
  // When a round that is on its way is likely to end, by the rhythm of the last ones; kForever: not
  // known.
  Nanos ExpectedArrival() const;
  bool shut_down() const { return shut_down_; }
  void FailAll(const Status& cause);
  // After a failure: unfinished operations may still use this memory, so it is never freed.
  void Leak();

  // For stall reports. Groups that are complete here and have waited since `since` or longer, the
  // oldest of each domain; and a join or shutdown that the others have not come to, as groups of a
  // domain without a name.
  static constexpr int kJoin = -1, kShutdown = -2;
  struct Waiting {
    std::string domain;
    int group = 0;
    Nanos since = 0;
    std::string tensors;  // labels of the group's entries
  };
  std::vector<Waiting> WaitingGroups() const;
  // The `since` of each, without the texts.
  template <class F>
  void EachWaiting(F f) const {
    for (const auto& [domain, queue] : queues_)
      if (const int oldest = OldestReady(queue); oldest >= 0) f(queue.ready_since[oldest]);
    if (join_since_ > 0 && !shutdown_asked_) f(join_since_);
    if (shutdown_since_ > 0 && !shut_down_) f(shutdown_since_);
  }
  bool Lacks(const Digest& domain, int group) const;
  const core::NegotiatorCounters& counters() const { return negotiator_.counters(); }
  const std::vector<int>& members() const { return members_; }
  int id() const { return id_; }

 private:
  // Batches of one domain in the order of Open; the negotiator knows the first.
  struct Queue {
    struct Waiting {
      BatchPtr batch;
      std::optional<std::string> abandoned;  // reason, where given up
    };
    std::list<Waiting> batches;
    bool begun = false;
    int groups_left = 0;
    std::vector<Nanos> ready_since;  // by group; 0: not reported ready, -1: has run
  };

  // An event for the negotiator; `batch`, where given, must still be the started one of its domain
  // when its turn comes.
  struct Pending {
    core::Event event;
    BatchPtr batch;
  };
  void Enqueue(core::Event event, BatchPtr batch = nullptr) {
    pending_.push_back({std::move(event), std::move(batch)});
  }
  // Feeds what is pending, performing the actions of each event before the next: an action may
  // start or end batches.
  void Drain();
  bool IsStarted(const BatchPtr& batch) const;
  static int OldestReady(const Queue& queue);  // -1: none
  void Perform(const core::Action& action, Nanos now);
  void BeginFirst(Queue* queue);
  void ReportReady(Queue* queue, int group);
  void EndFirst(const std::string& domain);
  void OpenNow(const BatchPtr& batch, std::optional<std::string> abandoned);
  void OpenHeld();
  void FailHeld(const Status& status);
  // With domain and process set in its text.
  Status Named(const std::string& domain, const Status& status) const;

  const int id_;
  const std::vector<int> members_;
  DataLoop* const data_;
  std::unique_ptr<comm::Communicator> control_;
  core::Negotiator negotiator_;
  std::map<std::string, Queue> queues_;
  comm::SegmentPtr words_;
  size_t word_count_ = 0;
  comm::LayoutPtr words_layout_;  // of so many
  comm::WorkPtr round_, union_;
  timeline::Rounds rounds_;
  std::string blob_;
  std::array<Nanos, 8> waits_{};  // the last groups': from ready here to agreed
  int64_t waits_count_ = 0;       // ever
  std::deque<Pending> pending_;
  std::vector<core::Action> actions_;  // room for those of an event
  // A join starts when the batches opened before it have ended; those opened after it wait for its
  // end.
  std::function<void(int)> joined_;
  bool join_started_ = false;
  std::vector<std::pair<BatchPtr, std::optional<std::string>>>
      after_join_;                             // and why given up since
  Nanos join_since_ = 0, shutdown_since_ = 0;  // 0: not asked for
  bool shutdown_asked_ = false;
  Status closed_;  // with it
  std::function<void()> all_shut_down_;
  bool shut_down_ = false;
};

}  // namespace gradred::engine
