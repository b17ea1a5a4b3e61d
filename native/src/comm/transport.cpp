#include "comm/transport.h"

#include <sched.h>

#include <algorithm>

namespace gradred::comm {
namespace {

constexpr Nanos kSpin = 50 * kMicrosecond;
constexpr Nanos kEarly = 50 * kMicrosecond;  // before an event that is expected
constexpr Nanos kFirstSleep = 20 * kMicrosecond, kLongestSleep = kMillisecond;

}  // namespace

Nanos Backoff::NextSleep(Nanos now, bool must_poll, Nanos limit) {
  const Nanos ahead = expected_ - kEarly - now;
  if (ahead > kSpin) {
    started_ = 0;
    return std::min({limit, ahead, must_poll ? kLongestSleep : kForever});
  }
  if (!spins_ && !must_poll) return limit;
  if (started_ == 0) {
    started_ = now;
    sleep_ = kFirstSleep;
  }
  // Ranks may outnumber cores: what this thread waits for may need the core it spins on.
  if (now - started_ < kSpin) return 0;
  if (!must_poll) return limit;
  const Nanos length = std::min(limit, sleep_);
  sleep_ = std::min(sleep_ + sleep_ / 2, kLongestSleep);
  return length;
}

void Backoff::Pause(Doorbell& bell, uint32_t ticket, bool must_poll, Nanos limit) {
  const Nanos length = NextSleep(Now(), must_poll, limit);
  if (length <= 0)
    sched_yield();
  else if (bell.Sleep(ticket, length))
    Reset();
}

Status Wait(Work& work, Transport& transport, Nanos timeout, const std::string& what) {
  const Nanos start = Now();
  Backoff backoff;
  while (true) {
    const uint32_t ticket = transport.bell().Ticket();
    if (work.Poll()) return work.status();
    const Nanos waited = Now() - start;
    if (waited >= timeout) {
      return {Kind::kTimeout, "rank " + std::to_string(transport.rank()) + ": " + what +
                                  " did not finish within " +
                                  std::to_string(timeout / kMillisecond) + " ms"};
    }
    backoff.Pause(transport.bell(), ticket, transport.MustPoll(), timeout - waited);
  }
}

}  // namespace gradred::comm
