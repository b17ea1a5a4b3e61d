// One pass over a domain on this rank: what was submitted, and what has finished.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/batch_trace.h"
#include "engine/metrics_store.h"
#include "engine/plan.h"
#include "engine/slots.h"
#include "engine/spec.h"
#include "reduce/convert.h"

namespace gradred::engine {

class BatchTimes;

// Runs `done` callbacks; those of one batch may run in several threads at once.
class Completions;

// Each group goes through filling -> ready (all members submitted) -> running (handed to the data
// loop) -> finished; from each state but the last it may fail. Any thread may call.
class Batch {
 public:
  // `slots`: of the plan's groups, null where there is none; or empty. A batch may outlive the
  // engine in a caller's hands, so it shares what it needs of it.
  Batch(DomainSpecPtr spec, std::shared_ptr<const Plan> plan, std::vector<SlotPtr> slots,
        std::shared_ptr<Completions> completions, std::shared_ptr<MetricsStore> metrics);
  ~Batch();  // an unfinished member's callback gets kInternal: nothing waits forever

  const DomainSpec& spec() const { return *spec_; }
  const DomainSpecPtr& spec_ptr() const { return spec_; }
  const Plan& plan() const { return *plan_; }
  const std::shared_ptr<const Plan>& plan_ptr() const { return plan_; }
  timeline::Tag tag() const { return trace_.tag(); }

  std::shared_ptr<BatchTimes> times;  // null: not recorded; set before the batch starts

  // Keeps the submission, and packs its tensor if the group's slot is free for this batch. Returns
  // the group that became ready, or -1. A member of a group that failed gets its error at once.
  // Throws kInvalidArgument for a position out of range or submitted before.
  int Submit(int position, Submission submission);

  bool IsReady(int group) const;
  // A group that is ready is agreed on and will run: from here on FailRest leaves it alone.
  void Start(int group);
  // The members of a group that was started.
  std::vector<Submission*> Take(int group);
  // What Submit has packed of it into the group's slot, while the slot was this batch's.
  struct Packed {
    std::vector<bool> members;
    reduce::ConvertCounts counts;
  };
  Packed TakePacked(int group);
  // `results` in the order of the group's members.
  void Finish(int group, std::vector<Result> results);
  // Fails the groups that are not running nor finished; members submitted later fail alike.
  void FailRest(const Status& status);
  // Fails one running group.
  void FailGroup(int group, const Status& status);

 private:
  enum class State : uint8_t { kFilling, kReady, kRunning, kFinished, kFailed };
  // Collects what `Complete` has finished while the lock is held, and posts it when the lock is
  // gone.
  class Lock;
  int Arrive(int position, Lock* lock);  // of a member that is kept or packed: as Submit
  void Complete(int position, Result result, Lock* lock);
  Slot* SlotOf(int group) const { return slots_.empty() ? nullptr : slots_[group].get(); }

  const DomainSpecPtr spec_;
  const std::shared_ptr<const Plan> plan_;
  const std::shared_ptr<Completions> completions_;
  const std::shared_ptr<MetricsStore> metrics_;
  const std::vector<SlotPtr> slots_;
  mutable std::mutex mutex_;
  struct Member {
    Submission submission;
    bool submitted = false, completed = false;
    bool packing = false, packed = false;  // being read by Submit; lies in the slot
  };
  struct Group {
    int missing = 0;  // members not submitted
    State state = State::kFilling;
    reduce::ConvertCounts counts;  // of what is packed
  };
  std::vector<Member> members_;
  std::vector<Group> groups_;
  Status failure_;
  int not_submitted_, not_completed_;
  Nanos last_submit_ = 0;
  BatchTrace trace_;
};

using BatchPtr = std::shared_ptr<Batch>;

}  // namespace gradred::engine
