// Memory of one process set that groups are packed into; grows with need and is counted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/communicator.h"

namespace gradred::engine {

class FusionBuffer {
 public:
  // At least nbytes. Grows in the order of the groups that run, which is the same on all ranks, as
  // Communicator::Alloc asks.
  comm::Segment& Reserve(comm::Communicator& communicator, int64_t nbytes) {
    constexpr int64_t kPage = 4096;
    if (!segment_ || segment_->nbytes() < nbytes) {
      segment_.reset();  // the old memory first: the peak is the new size
      segment_ = communicator.Alloc((std::max<int64_t>(nbytes, 1) + kPage - 1) / kPage * kPage);
    }
    return *segment_;
  }
  int64_t nbytes() const { return segment_ ? segment_->nbytes() : 0; }

 private:
  comm::SegmentPtr segment_;
};

}  // namespace gradred::engine
