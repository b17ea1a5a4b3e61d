// Sequence numbers wrap around: a Work posts nothing before the Work that had its tag before has
// finished.
#pragma once

#include <memory>

#include "comm/transport.h"

namespace gradred::comm {

struct TagTurn {
  Tag tag;
  std::weak_ptr<void> before;  // alive while the earlier Work has the tag
  std::shared_ptr<void> mine;  // kept by this Work until it has finished

  bool HasCome() const { return before.expired(); }
};

}  // namespace gradred::comm
