// What implementations of Communicator::AllocOnAll are made of.
#pragma once

#include "comm/communicator.h"

namespace gradred::comm {

// Null where there is no room, which is logged.
SegmentPtr AllocOrLog(Communicator& communicator, int64_t nbytes);

// After `first` (null: at once): takes `*segment` from all ranks where one has none, or where
// `first` has failed with kUnsupported, which is logged.
WorkPtr AgreeOnSegment(Communicator& communicator, WorkPtr first, SegmentPtr* segment);

}  // namespace gradred::comm
