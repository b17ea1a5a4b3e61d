// Seam: the allreduce of an outside library, on memory of this process.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace gradred::comm {

// Over a fixed list of ranks. Its sums come in an order of the library's own. Used by the thread of
// the transport that made it.
class NativeReduce {
 public:
  virtual ~NativeReduce() = default;
  // The library has each section's dtype with its operation.
  virtual bool Knows(const reduce::Layout& layout) const = 0;
  // In place on the layout's bytes, which lie at `data`. Begins at once; the ranks call in one
  // order.
  virtual WorkPtr AllReduce(void* data, const reduce::Layout& layout) = 0;
};
using NativeReducePtr = std::shared_ptr<NativeReduce>;

}  // namespace gradred::comm
