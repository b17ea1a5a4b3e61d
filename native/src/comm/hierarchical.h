// Two communicators as one: `intra` joins the ranks of a node, `inter` the ranks with one local
// rank.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace gradred::comm {

struct HierarchicalOptions {
  int64_t chunk_nbytes = 4 << 20;  // the phases of different chunks overlap
  int chunks_in_flight = 3;
  int64_t cargo_chunk_nbytes = 1 << 20;  // of AllReduceCargo, through one slot more than in flight
};

// `flat` serves what has no hierarchy here (AllGatherV, Broadcast, AllToAllV, Barrier, Union) and
// covers the whole set. AllReduce: ReduceScatter in the node over P = the smallest local size
// parts, AllReduce of each part between the nodes by its owner, AllGather in the node. `inter` is
// null on ranks with local_rank >= P. Nodes may differ in size.
//
// What it asks of them (kInternal where it can tell):
// * Ranks of `intra` are the local ranks, ranks of `inter` the node numbers. `options` are alike on
// all ranks.
// * Segments come from `intra`. `inter` and `flat` take them too: memory that the host can address.
// * Their transports are one, or ring one bell: transport() is that of `flat`.
// * Averages of halves: communicators scale by 2^-k, k = log2(average_residual() * size()). All
// nodes have to arrive at k =
//   ceil(log2(largest local size)). An `intra` that can take that size when it is made
//   (ShmOptions::scale_size) should; where one falls short, as a smaller node's would, the rest is
//   applied here, which rounds once more what becomes subnormal.
//
// Calls may overlap, but a call's works start when those of the calls before have been started: see
// Note [Order of works in hierarchical]. The sums do not depend on the options.
std::unique_ptr<Communicator> MakeHierarchical(const Topology& topology,
                                               std::unique_ptr<Communicator> intra,
                                               std::unique_ptr<Communicator> inter,
                                               std::unique_ptr<Communicator> flat,
                                               const HierarchicalOptions& options);

}  // namespace gradred::comm
