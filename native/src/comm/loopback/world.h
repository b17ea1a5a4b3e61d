// Worlds whose ranks are threads of this process, so that the engine is tested without processes.
#pragma once

#include <memory>
#include <vector>

#include "comm/algorithm_communicator.h"
#include "comm/bootstrap.h"
#include "comm/hierarchical.h"
#include "comm/world.h"

namespace gradred::comm {

struct LoopbackOptions {
  int virtual_nodes = 1;      // cuts the ranks into this many nodes of consecutive ranks
  std::vector<int> node_of;   // [size]; replaces virtual_nodes
  bool see_own_node = false;  // CheckPeers reports ranks of the same node alone, else all
  bool hierarchical = false;  // data communicators: MakeHierarchical over sub-groups, else flat
  HierarchicalOptions hierarchical_options;
  AlgorithmOptions algorithm_options;
  Nanos timeout = 30 * kSecond;  // of Close
};

// Element r is the world of rank r, for the thread that plays it.
std::vector<std::unique_ptr<World>> MakeLoopbackWorlds(int size, LoopbackOptions options = {});

// Any thread. Acts as the end of the process of `rank`, of the worlds that `world` belongs to:
// nothing comes from or to it any more, and CheckPeers of the others reports it.
void KillLoopbackRank(World& world, int rank);

// Element r is the bootstrap of rank r. AllGather throws kTimeout when a rank does not come within
// `timeout`.
std::vector<std::unique_ptr<Bootstrap>> MakeLoopbackBootstraps(int size,
                                                               Nanos timeout = 30 * kSecond);

}  // namespace gradred::comm
