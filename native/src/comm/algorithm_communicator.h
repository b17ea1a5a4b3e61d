// All collectives over a Transport by point-to-point messages: the reference, and the one between nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace gradred::comm {

// `members`: ranks of `transport`, in the communicator's rank order; the caller's own rank is among them. `channel` is the same
// on all members and used by no other communicator of these transports. `transport` must outlive the communicator.
// Algorithms (Thakur, Rabenseifner, Gropp: doi:10.1177/1094342005051521): recursive doubling for short and recursive
// halving and doubling for long allreduce, both in the order of Note [Order of summation]; binomial broadcast; Bruck or
// ring allgather; pairwise alltoall; dissemination barrier.
std::unique_ptr<Communicator> MakeAlgorithmCommunicator(Transport& transport, std::vector<int> members,
                                                        uint16_t channel);

}  // namespace gradred::comm
