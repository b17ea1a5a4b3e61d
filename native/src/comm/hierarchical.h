// Two communicators as one: `intra` joins the ranks of a node, `inter` the ranks with one local rank.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace gradred::comm {

struct HierarchicalOptions {
  int64_t chunk_nbytes = 4 << 20;  // the phases of different chunks overlap
  int chunks_in_flight = 3;
};

// `flat` serves what has no hierarchy here (AllGatherV, Broadcast, AllToAllV, Barrier, Union) and covers the whole set.
// AllReduce: ReduceScatter in the node over P = the smallest local size parts, AllReduce of each part between the
// nodes by its owner, AllGather in the node. `inter` is null on ranks with local_rank >= P. Nodes may differ in size.
std::unique_ptr<Communicator> MakeHierarchical(const Topology& topology, std::unique_ptr<Communicator> intra,
                                               std::unique_ptr<Communicator> inter,
                                               std::unique_ptr<Communicator> flat,
                                               const HierarchicalOptions& options);

}  // namespace gradred::comm
