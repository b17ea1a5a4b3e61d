// The reductions of one hierarchical communicator and the works that they are made of.
#pragma once

#include <memory>

#include "comm/hierarchical.h"

namespace gradred::comm {

struct HierarchicalParts {
  Topology topology;
  std::unique_ptr<Communicator> intra, inter;
  int owners = 1;            // local ranks that reduce between nodes
  int missing_halvings = 0;  // of averages, where this node is smaller than the largest
  HierarchicalOptions options;
};

class HierarchicalQueue {
 public:
  virtual ~HierarchicalQueue() = default;
  virtual HierarchicalParts& parts() = 0;
  // In place, and of a cargo: see Communicator.
  virtual WorkPtr Start(Segment& segment, int64_t offset, LayoutPtr layout) = 0;
  virtual WorkPtr Start(LayoutPtr layout, CargoPtr cargo) = 0;
  virtual int64_t window_nbytes() const = 0;
};

// `transport`: whose bell is rung when there is more to do.
std::shared_ptr<HierarchicalQueue> MakeHierarchicalQueue(HierarchicalParts parts,
                                                         Transport& transport);

}  // namespace gradred::comm
