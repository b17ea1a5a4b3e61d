// The exchange of a step: border values of all fields that need it go to each neighbour in one
// message.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "pde/grid.h"

namespace gradred::pde {

// Consecutive (stride 1) or strided values of one field.
struct Strip {
  int field;  // index into what Start is given
  int64_t offset, count, stride;
};

// What passes between this block and the neighbour on `side` (an index of Block::neighbours). A
// rank's `send` has the counts of its neighbour's `recv`.
struct Side {
  int side;
  std::vector<Strip> send;  // own values at the border
  std::vector<Strip> recv;  // ghosts
};

struct Traffic {
  int64_t messages = 0, nbytes = 0;  // sent by this rank
  Nanos time = 0;                    // that its caller spent on exchanges
};

// How borders travel: messages of a pair of ranks match in the order of their calls.
class Messages {
 public:
  virtual ~Messages() = default;
  // Start one; the memory comes from Scratch.
  virtual void Send(int peer, const void* data, int64_t nbytes) = 0;
  virtual void Recv(int peer, void* data, int64_t nbytes) = 0;
  // Until all have finished. Throws what one failed with.
  virtual void WaitForMessages() = 0;
  // Until the end of the operation, and beyond it while something may still be written there.
  virtual void* Scratch(int64_t nbytes) = 0;
};

// Used by one thread. Attach, then Start and Finish in turn; the strips may not be written in
// between.
template <class T>
class Border {
 public:
  // Sides without a neighbour are left out.
  Border(const Block& block, const std::vector<Side>& sides);

  // Before the first Start of an operation.
  void Attach(Messages* messages);

  void Start(T* const* fields);
  // Waits, and fills the ghosts.
  void Finish();
  // Any thread.
  Traffic traffic() const { return {messages_sent_, nbytes_sent_, time_}; }

 private:
  struct Line {
    int peer;
    std::vector<Strip> send, recv;
    int64_t out_count, in_count;
    T* out = nullptr;
    T* in = nullptr;
  };
  Messages* messages_ = nullptr;
  std::vector<Line> lines_;
  std::vector<T*> fields_;  // of the exchange under way
  std::atomic<int64_t> messages_sent_{0}, nbytes_sent_{0};
  std::atomic<Nanos> time_{0};
};

}  // namespace gradred::pde
