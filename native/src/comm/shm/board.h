// Where the works of one communicator in shared memory meet: flags, and room for small data.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/shm/memory.h"
#include "comm/transport.h"

namespace gradred::comm::shm {

// Counts the ranks that have passed; each passes once a round. Never reset, so that nobody has to
// know when all have seen it.
struct alignas(64) Gate {
  std::atomic<uint64_t> count{0};
};

enum class What : uint32_t { kReduceScatter = 1, kAllGather = 2, kAllReduce = 3, kCargo = 4 };
const char* WhatName(What what);

// What a rank says when it arrives at a work. Plain bytes.
struct Arrival {
  MemoryKey key;  // of the memory that the peers work in; all zero when the data lie on the board
  int64_t offset = 0;
  int64_t nbytes = 0;  // that the work covers
  What what{};
  uint32_t unused = 0;
};
static_assert(sizeof(Arrival) == 64);

// That can be under way; the next waits for the oldest.
constexpr int kWorksUnderWay = 16;
// Places. A work of small data has finished on one rank while another has yet to look at what came
// with it. So who comes to work n + 32 has finished n + 16, to which all have come, each after it
// had finished n.
constexpr int kWorksOnBoard = 2 * kWorksUnderWay;

struct BoardShape {
  int members = 1;
  int64_t small_nbytes = 0;  // a multiple of 64
  int chunks = 1;            // in a window
};

// Zero-initialised memory is a board that nobody has come to. Works, works in place, small works
// and chunks are numbered from 0, each kind for itself and alike on all ranks, so that each passes
// its gates in every round. Nothing that is read from it is an index or a size before it
// has been compared with the reader's own plan.
class Board {
 public:
  static int64_t NbytesFor(const BoardShape& shape);
  // Throws kTransportError when `memory` has another size than the shape needs.
  Board(std::unique_ptr<Memory> memory, const BoardShape& shape);

  Gate& arrived(uint64_t work) { return gates_[2 * (work % kWorksOnBoard)]; }
  Gate& done(uint64_t in_place) { return gates_[2 * (in_place % kWorksOnBoard) + 1]; }
  Arrival& arrival(uint64_t work, int rank) {
    return arrivals_[(work % kWorksOnBoard) * members() + static_cast<uint64_t>(rank)];
  }

  Gate& packed(uint64_t chunk) { return ChunkGates(chunk)[0]; }
  Gate& reduced(uint64_t chunk) { return ChunkGates(chunk)[1]; }

  // Two buffers a rank: see Note [Small reductions].
  char* small(uint64_t small_work, int rank) {
    const uint64_t number = (small_work % 2) * members() + static_cast<uint64_t>(rank);
    return small_ + number * static_cast<uint64_t>(shape_.small_nbytes);
  }

  int64_t nbytes() const { return memory_->nbytes(); }
  const MemoryKey& key() const { return memory_->key(); }

 private:
  uint64_t members() const { return static_cast<uint64_t>(shape_.members); }
  Gate* ChunkGates(uint64_t chunk) {
    return gates_ + 2 * kWorksOnBoard + 2 * (chunk % static_cast<uint64_t>(shape_.chunks));
  }

  std::unique_ptr<Memory> memory_;
  BoardShape shape_;
  Gate* gates_;
  Arrival* arrivals_;
  char* small_;
};

// A communicator's board comes into being: its first rank makes it when it first needs it and sends
// the others the key. Local steps, polled.
class BoardOpening {
 public:
  BoardOpening(Transport& transport, std::vector<int> members, Tag tag);
  ~BoardOpening();

  bool started() const { return mail_ != nullptr; }
  // For the first rank, with the board's key; for the others, with null.
  void Start(const MemoryKey* key);
  // True when all messages have been sent or received. Throws what they failed with.
  bool Poll();
  const MemoryKey& key() const { return mail_->key; }

 private:
  struct Mail {
    MemoryKey key;
    std::vector<WorkPtr> works;
  };
  Transport& transport_;
  std::vector<int> members_;
  Tag tag_;
  std::unique_ptr<Mail> mail_;
};

}  // namespace gradred::comm::shm
