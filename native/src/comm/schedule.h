// A collective compiled for one rank: who sends what to whom, and what is computed in between. Pure
// data; one Work runs any schedule over any Transport.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/communicator.h"
#include "comm/tag_turn.h"

namespace gradred::comm {

// The memory that a schedule names.
enum class Buffer : uint8_t {
  kData,     // in and out, from the caller
  kIn,       // from the caller, read only
  kOut,      // to the caller: what is received here goes to bytes that no earlier stage touches
  kScratch,  // of the Work; as kOut
};

struct Slice {
  Buffer buffer = Buffer::kData;
  int64_t offset = 0;
  int64_t nbytes = 0;
};

struct Transfer {
  int peer = -1;
  Slice slice;
};

struct Local {
  enum class Kind : uint8_t {
    kCopy,      // out = a
    kHop,       // out = a + b, see reduce::Layout::ReduceHop
    kHopAlone,  // out = HopAlone(out)
  };
  Kind kind = Kind::kCopy;
  Slice out, a, b;
  int64_t begin = 0;  // hops: where the slices lie in the data
};

// All transfers of a stage are under way together; when they have finished, the local steps run in
// order.
struct Stage {
  std::vector<Transfer> sends, receives;
  std::vector<Local> locals;
};

struct Schedule {
  std::vector<Stage> stages;
  int64_t scratch_nbytes = 0;

  // Starts a stage; the calls below add to the last one. Transfers of no bytes are left out: both
  // sides know.
  Stage& Next();
  void Send(int peer, Slice slice);
  void Recv(int peer, Slice slice);
  void Copy(Slice out, Slice a);
  void Hop(Slice out, Slice a, Slice b, int64_t begin);
  void HopAlone(Slice out, int64_t begin);
  // New scratch memory, aligned to reduce::kAlign.
  Slice Scratch(int64_t nbytes);
};

struct ScheduleBuffers {
  void* data = nullptr;
  const void* in = nullptr;
  void* out = nullptr;
  LayoutPtr layout;                            // for hops
  int64_t layout_begin = 0;                    // where `data` lies in it
  std::shared_ptr<BufferPool> pool = nullptr;  // for scratch memory
};

// Runs `schedule`, whose peers are ranks of `transport`.
WorkPtr RunSchedule(Transport& transport, TagTurn turn, Schedule schedule, ScheduleBuffers buffers);

}  // namespace gradred::comm
