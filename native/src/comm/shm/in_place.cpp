#include <algorithm>
#include <cstring>
#include <utility>

#include "base/timeline.h"
#include "comm/shm/job.h"

namespace gradred::comm::shm {
namespace {

// Note [Reductions in shared memory]
// Each rank's segment is its own slot. A rank *arrives* when its contents are final and says where
// they are; after all have arrived, rank r reduces its part over all slots into its own slot
// (ReduceScatter) or pushes its part into all slots (AllGather), and is *done*. Its Work ends when
// all are done: nobody reads or writes its slot from then on, so the rank may reuse the slot
// without a word to anyone. Pulling instead would need a third flag for that: a rank that has
// pulled everything cannot know whether the others have pulled from it. An allreduce does both in
// one pass, block by block while the block is in cache: rank r alone reads part r of the slots, so
// it may overwrite that part in each slot as soon as it has reduced it.
//
// Flags are gates on the communicator's board: one counter for all ranks, so a rank that waits
// reads one line, and the last to pass knows that it is the last and wakes the others.
class InPlaceJob final : public Job {
 public:
  InPlaceJob(Common& common, SharedSegment& segment, int64_t offset, What what, LayoutPtr layout,
             std::vector<reduce::Range> parts, int64_t nbytes)
      : Job(common, what, offset, nbytes),
        key_(segment.key()),
        turn_(common.in_place_started++),
        layout_(std::move(layout)),
        parts_(std::move(parts)),
        slots_(static_cast<size_t>(common.size())) {
    slots_[me()] = static_cast<char*>(segment.data()) + offset;
    at_ = parts_[me()].begin;
  }

 private:
  enum class State { kWait, kArrived, kMove, kDone };

  size_t me() const { return static_cast<size_t>(common_.rank); }

  bool Step(int64_t* budget) override {
    switch (state_) {
      case State::kWait:
        if (!PlaceIsFree()) return false;
        Arrive(key_);
        state_ = State::kArrived;
        return true;
      case State::kArrived:
        if (!AllArrived()) return false;
        for (int peer = 0; peer < common_.size(); ++peer) {
          if (peer == common_.rank) continue;
          slots_[static_cast<size_t>(peer)] = MemoryOf(peer, offset_ + nbytes_) + offset_;
        }
        state_ = State::kMove;
        return true;
      case State::kMove:
        if (!MoveBlock(budget)) {
          common_.Pass(common_.board->done(turn_), turn_ / kWorksOnBoard);
          state_ = State::kDone;
        }
        return true;
      case State::kDone:
        finished = common_.AllPassed(common_.board->done(turn_), turn_ / kWorksOnBoard);
        return finished;
    }
    return false;
  }

  // False when nothing of my part is left.
  bool MoveBlock(int64_t* budget) {
    const size_t n = slots_.size();
    if (at_ >= parts_[me()].end || (n == 1 && common_.shift == 0)) return false;
    const int64_t block = reduce::AlignUp(common_.options.block_nbytes);
    const reduce::Range range{at_, std::min(at_ + block, parts_[me()].end)};
    const timeline::ChunkSpan span(timeline::Work::kSum, range.nbytes());
    if (what_ != What::kAllGather) {
      layout_->ReduceNode(slots_[me()], reinterpret_cast<const void* const*>(slots_.data()),
                          static_cast<int>(n), range, common_.node_scale());
    }
    if (what_ != What::kReduceScatter) {
      for (size_t i = 1; i < n; ++i) {
        std::memcpy(slots_[(me() + i) % n] + range.begin, slots_[me()] + range.begin,
                    static_cast<size_t>(range.nbytes()));
      }
    }
    at_ = range.end;
    *budget -= range.nbytes() * static_cast<int64_t>(n);
    return true;
  }

  const MemoryKey key_;
  const uint64_t turn_;  // among the jobs in place
  const LayoutPtr layout_;
  const std::vector<reduce::Range> parts_;
  std::vector<char*> slots_;  // of all ranks, at the offset
  int64_t at_ = 0;            // of my part, done so far
  State state_ = State::kWait;
};

}  // namespace

std::unique_ptr<Job> MakeInPlaceJob(Common& common, SharedSegment& segment, int64_t offset,
                                    What what, LayoutPtr layout, std::vector<reduce::Range> parts,
                                    int64_t nbytes) {
  return std::make_unique<InPlaceJob>(common, segment, offset, what, std::move(layout),
                                      std::move(parts), nbytes);
}

}  // namespace gradred::comm::shm
