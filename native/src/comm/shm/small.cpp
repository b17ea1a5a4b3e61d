#include <cstring>
#include <utility>

#include "base/timeline.h"
#include "comm/shm/job.h"

namespace gradred::comm::shm {
namespace {

// Note [Small reductions]
// Each rank writes its bytes to its buffer on the board and arrives; after all have arrived, every
// rank reduces all buffers by itself, in the same order, and has finished: one exchange of flags.
//
// A rank does not learn when the others have read its buffer, but two buffers, used in turn, are
// enough because a rank arrives at small work s only when it has finished small work s - 1. Buffer
// s % 2 was used last by s - 2. A rank writes to it after it has finished s - 1; so all ranks had
// arrived at s - 1, each after it had finished s - 2, that is, after its last look at the buffers
// of s - 2.
class SmallJob : public Job {
 public:
  SmallJob(Common& common, What what, int64_t offset, LayoutPtr layout, int64_t nbytes)
      : Job(common, what, offset, nbytes),
        layout_(std::move(layout)),
        turn_(common.small_started++) {}

 protected:
  virtual void Write(char* to) = 0;
  // All have written.
  virtual void Read() = 0;

  char* BufferOf(int rank) { return common_.board->small(turn_, rank); }
  void Reduce(void* out, reduce::Range range) {
    const timeline::ChunkSpan span(timeline::Work::kSum, range.nbytes());
    std::vector<const void*> buffers(common_.members.size());
    for (int r = 0; r < common_.size(); ++r) buffers[static_cast<size_t>(r)] = BufferOf(r);
    layout_->ReduceNode(out, buffers.data(), common_.size(), range, common_.node_scale());
  }

  const LayoutPtr layout_;

 private:
  bool Step(int64_t* budget) override {
    if (!arrived_) {
      if (common_.small_finished != turn_ || !PlaceIsFree()) return false;
      Write(BufferOf(common_.rank));
      Arrive({});
      arrived_ = true;
      return true;
    }
    if (!AllArrived()) return false;
    Read();
    *budget -= nbytes_ * common_.size();
    ++common_.small_finished;
    finished = true;
    return true;
  }

  const uint64_t turn_;
  bool arrived_ = false;
};

class SmallSegmentJob final : public SmallJob {
 public:
  SmallSegmentJob(Common& common, SharedSegment& segment, int64_t offset, What what,
                  LayoutPtr layout, std::vector<reduce::Range> parts, int64_t nbytes)
      : SmallJob(common, what, offset, std::move(layout), nbytes),
        data_(static_cast<char*>(segment.data()) + offset),
        parts_(std::move(parts)) {}

 private:
  reduce::Range Mine() const { return parts_[static_cast<size_t>(common_.rank)]; }

  void Write(char* to) override {
    const reduce::Range range = what_ == What::kAllGather ? Mine() : reduce::Range{0, nbytes_};
    std::memcpy(to + range.begin, data_ + range.begin, static_cast<size_t>(range.nbytes()));
  }
  void Read() override {
    if (what_ != What::kAllGather) {
      Reduce(data_, what_ == What::kAllReduce ? reduce::Range{0, nbytes_} : Mine());
      return;
    }
    for (int r = 0; r < common_.size(); ++r) {
      const reduce::Range range = parts_[static_cast<size_t>(r)];
      if (r == common_.rank) continue;
      std::memcpy(data_ + range.begin, BufferOf(r) + range.begin,
                  static_cast<size_t>(range.nbytes()));
    }
  }

  char* const data_;
  const std::vector<reduce::Range> parts_;
};

class SmallCargoJob final : public SmallJob {
 public:
  SmallCargoJob(Common& common, LayoutPtr layout, CargoPtr cargo)
      : SmallJob(common, What::kCargo, 0, layout, layout->nbytes()), cargo_(std::move(cargo)) {}

 private:
  void Write(char* to) override {
    if (nbytes_ > 0) cargo_->Pack({0, nbytes_}, to);
  }
  void Read() override {
    if (nbytes_ == 0) return;
    // The peers may still read my buffer: the sums need a place of their own.
    common_.scratch.resize(static_cast<size_t>(common_.shape().small_nbytes / reduce::kAlign));
    Reduce(common_.scratch.data(), {0, nbytes_});
    cargo_->Unpack({0, nbytes_}, common_.scratch.data());
  }

  const CargoPtr cargo_;
};

}  // namespace

std::unique_ptr<Job> MakeSmallJob(Common& common, SharedSegment& segment, int64_t offset, What what,
                                  LayoutPtr layout, std::vector<reduce::Range> parts,
                                  int64_t nbytes) {
  return std::make_unique<SmallSegmentJob>(common, segment, offset, what, std::move(layout),
                                           std::move(parts), nbytes);
}

std::unique_ptr<Job> MakeSmallCargoJob(Common& common, LayoutPtr layout, CargoPtr cargo) {
  return std::make_unique<SmallCargoJob>(common, std::move(layout), std::move(cargo));
}

}  // namespace gradred::comm::shm
