// One long reduction as chunks that are under way together.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/communicator.h"
#include "comm/tag_turn.h"

namespace gradred::comm {

struct StreamParts {
  Transport* transport = nullptr;  // its bell is rung when there is more to do
  LayoutPtr layout;
  int64_t chunk_nbytes = 0;    // multiple of kAlign
  std::vector<TagTurn> turns;  // one a chunk under way
  CargoPtr cargo;              // null: the bytes lie at `data`
  char* data = nullptr;
  std::shared_ptr<BufferPool> pool;
  // Starts the reduction of `range` of the layout, whose bytes lie at `at`.
  std::function<WorkPtr(TagTurn turn, reduce::Range range, char* at)> reduce;
};

// Note [Chunks under way]
// Chunk c uses turn c modulo their number, so that the tags of a call are known when it is made,
// whatever is called meanwhile and however far the chunks are. It starts when the chunk that had
// the turn before is unpacked here: messages of one tag keep their order, so the peers need not
// know.
WorkPtr StreamReduction(StreamParts parts);

}  // namespace gradred::comm
