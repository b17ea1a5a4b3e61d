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
  std::atomic<uint32_t> muted{0};
};

// Use: ticket = bell.Ticket(); look for work; if none, bell.Sleep(ticket, timeout). A ring after
// Ticket() is never lost, unless the bell is muted.
class Doorbell {
 public:
  // `word` must outlive the doorbell. `shared`: the word is mapped by several processes.
  Doorbell(DoorbellWord* word, bool shared) : word_(word), shared_(shared) {}

  // Something has come for the owner. Any thread or process. No system call unless somebody sleeps
  // who is to be woken.
  void Ring();
  // As Ring, but wakes the sleeper of a muted bell too.
  void Call();
  // Muted: a Ring is counted and wakes nobody, since somebody else looks, or what comes can wait.
  // Whoever ends that must compare the ticket of before its last look with that of afterwards.
  void Mute(bool muted) { word_->muted.store(muted ? 1 : 0, std::memory_order_seq_cst); }
  uint32_t Ticket() const { return word_->rings.load(std::memory_order_seq_cst); }
  // True if rung after `ticket` was taken, false when `timeout` passed first. May return early. One
  // sleeper at a time.
  bool Sleep(uint32_t ticket, Nanos timeout);

 private:
  void Wake();

  DoorbellWord* word_;
  bool shared_;
};

}  // namespace gradred
