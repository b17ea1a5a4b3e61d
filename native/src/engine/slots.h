// Memory of groups of their own, which the threads that finish tensors pack into before the group
// runs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/arenas.h"
#include "engine/plan.h"

namespace gradred::engine {

// Note [Slots]
// A group that has run before with the same layout has a slot: a range of an arena (Note [Arenas])
// in which it is reduced in place. Which groups have one, where it lies, and when an arena is added
// follow from the order in which groups run, which is the same on all ranks; only whether a rank
// gets the memory of an arena does not, so the ranks tell each other (AllocOnAll), and if one has
// none, the set's arenas grow no more on any rank. Whether this rank's tensors are
// in the slot when the group runs is this rank's own affair: what is not there is packed by the
// data loop.
//
// Batches queue for a slot with their first tensor. The first in the queue may pack, until it has
// run or failed: so batch t + 1 packs only after the own unpack of t, and nothing else is needed,
// since nobody touches a slot after its owner's Work has finished. A batch that is not the first
// keeps its tensors.
//
// A group may run on a slot that somebody else packs into: a batch opened at the same time by
// another thread, one that waits for the end of a join. The run then takes the slot (Enter), waits
// for packers to leave, which takes them as long as it takes to copy a tensor, and what they packed
// counts for nothing: their batch packs it again when it runs.
class Slot {
 public:
  Slot(const Arenas::Range& range, int set_size) : set_size_(set_size), range_(range) {}

  int set_size() const { return set_size_; }
  // The memory is there until Close.
  const Arenas::Range& range() const { return range_; }
  char* data() const { return static_cast<char*>(range_.segment->data()) + range_.offset; }

  // Any thread. Where to pack, or null: keep the tensor. Until EndPack the memory stays. `user`: a
  // batch, which calls Quit once it has run or failed, and packs no more then.
  char* StartPack(const void* user);
  void EndPack();
  void Quit(const void* user);

  // The thread of the communicator. The slot is the run's until Leave. True: what `user` has packed
  // is there. `user` may be null.
  bool Enter(const void* user);
  void Leave();
  // Returns when all packers have left; nobody packs any more.
  void Close();

 private:
  struct User {
    const void* batch;
    int64_t run;  // the number of runs before which it packs; -1: has not packed
  };
  void Take(std::unique_lock<std::mutex>* lock);

  const int set_size_;
  const Arenas::Range range_;
  std::mutex mutex_;
  std::condition_variable left_;
  std::deque<User> users_;
  const void* packing_ = nullptr;  // the batch of the packers
  int packers_ = 0;
  int64_t runs_ = 0;
  bool taken_ = false;  // by a run, or closed
};
using SlotPtr = std::shared_ptr<Slot>;

// The slots of one process set.
class Slots {
 public:
  static constexpr int64_t kBudget = 64 << 20;  // bytes of arenas; groups beyond it have no slot

  // limit: bytes of the largest group that gets a slot; 0: none does.
  explicit Slots(int64_t limit) : limit_(limit) {}

  // Any thread: the slots of the plan's groups, null where there is none. Empty: no group has one.
  std::vector<SlotPtr> Find(const std::string& domain, const Plan& plan) const;

  // The thread of the communicator, for each group that is to run, until it returns true: `*slot`
  // is the group's then, or null. False: the ranks add an arena; call again with the same group.
  bool OnRun(const std::string& domain, const Plan& plan, int group,
             comm::Communicator& communicator, SlotPtr* slot);
  // Frees the memory, of all slots, while the communicator is still there.
  void Close();
  int64_t nbytes() const;  // of all arenas

 private:
  struct Record {
    std::vector<comm::LayoutPtr> layouts;  // of the plan's groups
    std::vector<int> runs;
    std::vector<SlotPtr> slots;
    int64_t last_run = 0;
  };
  Record& RecordOf(const std::string& domain, const Plan& plan, int group);
  // Gives the group a slot if an arena has room.
  bool Place(Record* record, int group, const comm::Communicator& communicator);
  // Counts a run of the group, and gives it a slot if it is to have one and there is room. Bytes of
  // the arena that is to be added for it; 0: none.
  int64_t Lacks(const std::string& domain, const Plan& plan, int group,
                const comm::Communicator& communicator);
  // True when no arena is being added. Looks without the lock.
  bool FinishGrowth(std::unique_lock<std::mutex>* lock);
  // Forgets the records that have not run for `runs` runs.
  void Forget(int64_t runs);
  void Free(Record* record);

  const int64_t limit_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Record> records_;  // by domain
  int64_t runs_ = 0;
  Arenas arenas_{kBudget};
  // The communicator's thread alone.
  comm::WorkPtr growth_;  // adds `grown_` to the arenas; null: nothing does
  comm::SegmentPtr grown_;
  int64_t look_at_ = 0;  // runs before which nothing is forgotten to make room
};
using SlotsPtr = std::shared_ptr<Slots>;

// The slots of all process sets; any thread.
class SlotTable {
 public:
  explicit SlotTable(int64_t limit) : limit_(limit) {}
  SlotsPtr Of(int set_id);
  void Drop(int set_id);

 private:
  const int64_t limit_;
  std::mutex mutex_;
  std::map<int, SlotsPtr> sets_;
};

}  // namespace gradred::engine
