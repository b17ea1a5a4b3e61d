// Collectives of ranks that share memory: reductions work in place on the ranks' own segments,
// without a copy in between.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/memory.h"

namespace gradred::comm::shm {

struct ShmOptions {
  uint64_t nonce = 0;  // of the job
  Naming naming = Naming::kAnonymous;
  // Averages of halves are scaled by 2^-ceil(log2(scale_size)): the largest local size where nodes
  // differ; 0: the own size.
  int scale_size = 0;
  int64_t block_nbytes = 64 << 10;  // reduced and pushed while in cache
  int64_t poll_nbytes = 1 << 20;    // moved by one Poll, so that other Works advance
  // Reduced on the board, at most. There and through a window, in us on an EPYC 9004: 4 KiB 1.2 and
  // 1.7, 8 KiB 1.8 and 1.9, 16 KiB 3.4 and 3.2 for 2 ranks; for 4 on 2 cores 6.6 and 15, 8.2 and
  // 11, 12 and 13.
  int64_t small_nbytes = 8192;
  int64_t chunk_nbytes = 128 << 10;  // of cargos, at most
  int window_chunks = 4;             // chunks of cargos under way
};

// `members`: ranks of `transport` that run on this machine, in the communicator's rank order, the
// caller's among them. Uses the channels `channel` and `channel + 1` of the transport. Allocation
// and attaching are local at all times.
std::unique_ptr<Communicator> MakeCommunicator(Transport& transport, std::vector<int> members,
                                               uint16_t channel, const ShmOptions& options);

}  // namespace gradred::comm::shm
