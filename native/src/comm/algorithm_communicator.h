// All collectives over a Transport by point-to-point messages: the reference, and the one between
// nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace gradred::comm {

enum class Algorithm : uint8_t {
  kRecursiveDoubling,  // allreduce
  kRecursiveHalving,   // allreduce: halving, then doubling
  kPairwise,           // allreduce and allgather
  kBruck,              // allgather
};
const char* AlgorithmName(Algorithm algorithm);

// The table of choices, by size of the whole result. The results do not depend on it.
struct AlgorithmRow {
  const char* collective = "";  // "allreduce", "allgather"
  int64_t from_nbytes = 0;
  Algorithm algorithm = Algorithm::kRecursiveDoubling;
  const char* why = "";
};
std::vector<AlgorithmRow> DefaultAlgorithms(int size);

struct AlgorithmOptions {
  // Rows that replace the default ones of their collective. Of the rows that apply, the one with
  // the largest from_nbytes is used.
  std::vector<AlgorithmRow> rows;
  int64_t broadcast_chunk_nbytes = 1 << 20;
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
