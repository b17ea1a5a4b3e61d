// Reductions of device memory by NCCL.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "comm/communicator.h"

namespace gradred::comm::nccl {

struct NcclOptions {
  std::string nccl_library;  // paths; empty: by the usual names
  std::string cudart_library;
  uint16_t channel =
      0;  // of the flat communicator's transport, used by nothing else: to notice its Abort
  int scale_size =
      0;  // averages of halves are scaled by 2^-ceil(log2(scale_size)); 0: by the own size
  Nanos timeout = 300 * kSecond;  // for meeting
};

// Collective over the ranks of `flat` and blocking. All ranks throw alike where one has no library
// or device; the message names the rank. `device`: CUDA's number of it on this rank; two ranks must
// not share one.
//
// Segments are device memory; what was written to one has to be complete (its stream synchronised)
// before the call that reduces it, and the Work is finished when the result is there. `flat` serves
// the collectives on host memory.
//
// Not for bits that must not change: NCCL chooses the order of sums by size and topology, sums
// halves as halves, and its min and max drop NaN. Averages of halves are sums of inputs that NCCL
// multiplies by 2^-k first (ncclRedOpCreatePreMulSum): ncclAvg multiplies by 1 / size, a rounding
// more where size is no power of two, and would not compose with nodes of other sizes. Either way
// inputs below 2^(k - 24) lose bits, unlike in the other communicators. Throws kUnsupported for
// int16 and for bit-and.
//
// Communicators that share a device have to be used in one order on all ranks, or NCCL deadlocks:
// the owner's task.
std::unique_ptr<Communicator> MakeNcclCommunicator(std::unique_ptr<Communicator> flat, int device,
                                                   const NcclOptions& options);

}  // namespace gradred::comm::nccl
