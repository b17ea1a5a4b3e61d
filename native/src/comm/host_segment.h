// Segments in private host memory.
#pragma once

#include "comm/communicator.h"

namespace gradred::comm {

// Not zeroed, aligned to reduce::kAlign; pages are touched first by who writes them.
SegmentPtr MakeHostSegment(int64_t nbytes);

}  // namespace gradred::comm
