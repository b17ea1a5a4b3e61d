// Where one thread sleeps until somebody, of this process or another, has work for it.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace gradred {

// Lives in private or in shared memory; zero-initialised memory is a valid word.
struct alignas(64) DoorbellWord {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};
};

// Use: ticket = bell.Ticket(); look for work; if none, bell.Sleep(ticket, timeout). A ring after
// Ticket() is never lost.
class Doorbell {
 public:
  // `word` must outlive the doorbell. `shared`: the word is mapped by several processes.
  Doorbell(DoorbellWord* word, bool shared) : word_(word), shared_(shared) {}

  // Any thread or process. No system call unless somebody sleeps.
  void Ring();
  uint32_t Ticket() const { return word_->rings.load(std::memory_order_acquire); }
  // True if rung after `ticket` was taken, false when `timeout` passed first. May return early.
  bool Sleep(uint32_t ticket, Nanos timeout);

 private:
  DoorbellWord* word_;
  bool shared_;
};

}  // namespace gradred
