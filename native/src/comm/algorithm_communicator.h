// All collectives over a Transport by point-to-point messages: the reference, and the one between
// nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/algorithms.h"
#include "comm/communicator.h"
#include "comm/native_reduce.h"

namespace gradred::comm {

struct AlgorithmOptions {
  std::vector<AlgorithmRow> rows;  // that replace the default ones of their collective
  int64_t broadcast_chunk_nbytes = 1 << 20;
  // Allreduce of more than a chunk: this many chunks are under way together.
  int64_t chunk_nbytes = 1 << 20;
  int chunks_in_flight = 4;
  NativeReducePtr native = nullptr;  // of the same members in their order; null: there is none
};

// `members`: ranks of `transport`, in the communicator's rank order; the caller's own rank is among
// them. `channel` is the same on all members and used by no other communicator of these transports.
// `transport` must outlive the communicator. `options` are the same on all members. Algorithms
// (Thakur, Rabenseifner, Gropp: doi:10.1177/1094342005051521): recursive doubling for short and
// recursive halving and doubling for long allreduce, or, where the size is no power of two, a
// pairwise exchange of parts, all in the order of Note [Order of summation]; binomial broadcast;
// Bruck or pairwise allgather; pairwise alltoall; dissemination barrier.
std::unique_ptr<Communicator> MakeAlgorithmCommunicator(Transport& transport,
                                                        std::vector<int> members, uint16_t channel,
                                                        const AlgorithmOptions& options = {});

}  // namespace gradred::comm
