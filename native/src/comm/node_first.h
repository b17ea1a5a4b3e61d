// Short reductions of many ranks with one message a node: in the node, between one rank of each,
// and in the node again.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace gradred::comm {

// `intra`: the node's ranks in local order; `leaders`: the nodes' first ranks in node order, null
// on the others; `flat`: all ranks, for what has no node in it (every collective but AllReduce).
// Segments come from `intra`. AllReduce of min, max and bit-and, where a value that comes twice
// does no harm: the node's result is reduced again with the leader's, which is thereby handed out.
// Other reductions go flat. A call's works start when the call before has finished, so calls that
// overlap are right but no faster.
std::unique_ptr<Communicator> MakeNodeFirst(std::unique_ptr<Communicator> intra,
                                            std::unique_ptr<Communicator> leaders,
                                            std::unique_ptr<Communicator> flat);

}  // namespace gradred::comm
