// Who takes part in a job, as the ranks tell each other while the world opens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/peers.h"
#include "comm/world.h"

namespace gradred::comm {

struct Roster {
  uint64_t nonce = 0;           // of the job; drawn by rank 0
  std::vector<Peer> ranks;      // by rank
  std::vector<int> machine_of;  // by rank; machines are numbered in order of their lowest rank
  std::vector<int> node_of;     // machines, or their virtual nodes
  // The ranks of the same machine, ascending.
  std::vector<int> MachineRanks(int rank) const;
  int machines() const;
};

// Collective. Throws on all ranks the same: kInvalidArgument with the ranks that have a problem and
// what it is; kMismatch when options that must agree differ, with the values and the ranks.
Roster MakeRoster(Bootstrap& bootstrap, const WorldOptions& options);

}  // namespace gradred::comm
