// Communicator::Union: exchanges of messages whose size the receiver does not know.
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/patterns.h"
#include "comm/tag_turn.h"

namespace gradred::comm {

// `steps` as RecursiveDoublingUnion gives them, with peers as ranks of `transport`.
WorkPtr RunUnion(Transport& transport, TagTurn turn, std::vector<Exchange> steps, std::string* blob,
                 MergeFunction merge);

}  // namespace gradred::comm
