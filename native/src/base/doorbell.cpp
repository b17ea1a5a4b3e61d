#include "base/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace gradred {
namespace {

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

void Doorbell::Ring() {
  word_->rings.fetch_add(1, std::memory_order_seq_cst);
  if (word_->muted.load(std::memory_order_seq_cst) == 0) Wake();
}

void Doorbell::Call() {
  word_->rings.fetch_add(1, std::memory_order_seq_cst);
  Wake();
}

void Doorbell::Wake() {
  if (word_->sleepers.load(std::memory_order_seq_cst) == 0) return;
  Futex(&word_->rings, shared_ ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, 1, nullptr);
}

bool Doorbell::Sleep(uint32_t ticket, Nanos timeout) {
  if (Ticket() != ticket) return true;
  if (timeout <= 0) return false;
  timeout = std::min<Nanos>(timeout, 3600 * kSecond);
  const timespec limit{static_cast<time_t>(timeout / kSecond),
                       static_cast<long>(timeout % kSecond)};
  word_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  Futex(&word_->rings, shared_ ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, ticket, &limit);
  word_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return Ticket() != ticket;
}

}  // namespace gradred
