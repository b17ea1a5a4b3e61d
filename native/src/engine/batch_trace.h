// A batch in the timeline. Called by the Batch, under its lock; free while nothing is recorded.
#pragma once

#include <memory>
#include <vector>

#include "base/timeline.h"
#include "engine/plan.h"

namespace gradred::engine {

// A group is in one phase after the other: waiting for members (first to last submission, if it has
// several), negotiation (to the agreement), queued (to the data loop's turn), reduce (to the
// results). The batch itself is a step, from its opening to the end of its last group; the end of
// the step is the wait, from the last submission.
class BatchTrace {
 public:
  BatchTrace(const DomainSpec& spec, const std::shared_ptr<const Plan>& plan) {
    if (timeline::Recording()) Open(spec, plan);
  }
  void Submitted(int position, int group, bool last_of_batch) {
    if (tag_.domain) DoSubmitted(position, group, last_of_batch);
  }
  void Ready(int group) {
    if (tag_.domain) Enter(group, Phase::kNegotiation);
  }
  void Agreed(int group) {
    if (tag_.domain) Enter(group, Phase::kQueued);
  }
  void Started(int group) {
    if (tag_.domain) Enter(group, Phase::kReduce);
  }
  void Ended(int group) {
    if (tag_.domain) DoEnded(group);
  }
  timeline::Tag tag() const { return tag_; }

 private:
  enum class Phase : uint8_t { kNone, kMembers, kNegotiation, kQueued, kReduce };
  void Open(const DomainSpec& spec, const std::shared_ptr<const Plan>& plan);
  void DoSubmitted(int position, int group, bool last_of_batch);
  void Enter(int group, Phase phase) { EnterAt(Now(), group, phase); }
  void EnterAt(Nanos at, int group, Phase phase);
  void DoEnded(int group);
  // `spent`: with the time that this thread has spent on chunks.
  void Push(timeline::Shape shape, const char* name, Nanos at, int group, bool spent = false);

  timeline::Tag tag_;
  std::vector<Phase> phases_;    // by group
  std::vector<int64_t> nbytes_;  // by group, of tensors
  std::vector<int> sizes_;       // by group: tensors
  size_t ended_ = 0;             // groups
  bool waits_ = false;
};

}  // namespace gradred::engine
