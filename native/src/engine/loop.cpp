#include "engine/loop.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/log.h"

namespace gradred::engine {

bool Loop::Session::Retake() {
  if (held_) return true;
  held_ = loop_->Take();
  if (!held_) return false;
  comm::Transport& transport = loop_->transport_;
  transport.bell().Mute(true);
  ticket_ = transport.bell().Ticket() - 1;  // not looked yet: if it ends so, the thread must look
  moved_ = false;
  return true;
}

bool Loop::Session::Step() {
  if (!held_ || !loop_->broken_.ok()) return false;
  ticket_ = loop_->transport_.bell().Ticket();
  try {
    return moved_ = loop_->Step();
  } catch (...) {
    loop_->broken_ = CurrentException();
    return false;
  }
}

bool Loop::Session::AwaitsMessages() const {
  return held_ && loop_->broken_.ok() && loop_->AwaitsMessages();
}

void Loop::Session::Release() {
  if (!held_) return;
  held_ = false;
  loop_->LetGo(ticket_, moved_);
}

// By a caller.
void Loop::LetGo(uint32_t ticket, bool moved) {
  Doorbell& bell = transport_.bell();
  const bool awaits = AwaitsMessages();
  const Nanos wake = NextWake();
  bool call = !broken_.ok();
  if (awaits) {
    call |= moved || transport_.MustPoll();
    bell.Mute(false);
    call |= bell.Ticket() != ticket;
  }
  taken_.store(false, std::memory_order_seq_cst);
  if (call || HasInbox() || demanded_.load(std::memory_order_seq_cst) ||
      wake < thread_wake_.load(std::memory_order_seq_cst))
    bell.Call();
}

void Loop::BindThread(int core) {
  if (core < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (core < CPU_SETSIZE) CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0)
    Log(LogLevel::kWarning, "GRADRED_THREAD_AFFINITY: core " + std::to_string(core) +
                                " cannot be had: " + std::strerror(errno));
}

void Loop::Drive() {
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // sleeps of 20 us would take 70
  comm::Backoff backoff(spins_);
  Doorbell& bell = transport_.bell();
  for (;;) {
    const uint32_t ticket = bell.Ticket();
    if (!Take()) {
      thread_wake_.store(kForever, std::memory_order_seq_cst);
      if (!Take()) {
        bell.Sleep(ticket, kLongestSleep);  // who has it calls when it leaves something
        continue;
      }
    }
    demanded_.store(false, std::memory_order_seq_cst);
    bool moved, awaits, must_poll;
    Nanos wake;
    {
      Completions::Scope callbacks(completions_.get());
      try {
        ThrowIfError(broken_);
        moved = Step();
        if (Ended()) {
          bell.Mute(false);
          return;
        }
      } catch (...) {
        bell.Mute(false);
        throw;
      }
      if (Hurried()) callbacks.HandOver();
      awaits = AwaitsMessages();
      must_poll = transport_.MustPoll();
      wake = NextWake();
      thread_wake_.store(wake, std::memory_order_seq_cst);
      backoff.Expect(ExpectedArrival());
      bell.Mute(!awaits);
      taken_.store(false, std::memory_order_seq_cst);
    }
    AfterStep();
    if (moved || HasInbox()) {
      backoff.Reset();
      continue;
    }
    const Nanos longest = std::clamp<Nanos>(wake - Now(), 0, kLongestSleep);
    if (awaits)
      backoff.Pause(bell, ticket, must_poll, longest);
    else
      bell.Sleep(ticket, longest);
  }
}

}  // namespace gradred::engine
