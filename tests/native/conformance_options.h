// What a caller of the conformance suite says about its configuration.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/transport.h"
#include "conformance_data.h"
#include "testing.h"

namespace conformance {

// Equal on all ranks.
struct ConformanceOptions {
  std::string name = "?";  // of the configuration, for failures
  uint64_t seed = 1;
  Nanos timeout = 30 * kSecond;   // of every wait
  int64_t chunk_nbytes = 4096;    // the communicator's chunk: the longest data have a few
  int64_t long_nbytes = 150'001;  // of messages: beyond what transports send eagerly
  bool abort = true;              // CheckTransport: abort the transport at the end

  // Node of each rank of the communicator, as Note [Order of summation] means it: inside a node
  // ascending rank with wide accumulators. Empty: every rank is a node of its own, as in flat
  // communicators; all zero: one node.
  std::vector<int> node_of;
  bool ordered = true;   // false: the order of sums is free (NCCL, native MPI)
  bool averages = true;  // false: no ReduceOp::kAverage
  bool plain = false;    // true: mixed layouts have neither halves nor bit-and

  // How segments are written and read; for device memory.
  std::function<void(void*, const void*, size_t)> write = [](void* to, const void* from, size_t n) {
    if (n > 0) std::memcpy(to, from, n);
  };
  std::function<void(void*, const void*, size_t)> read = write;
};

}  // namespace conformance
