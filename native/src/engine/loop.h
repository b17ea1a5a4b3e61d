// A loop of the engine: has a thread of its own, and may be stepped by other threads.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "comm/transport.h"
#include "engine/completions.h"

namespace gradred::engine {

constexpr Nanos kLongestSleep = 250 * kMillisecond;  // of a loop's thread

// Note [Who steps a loop]
// Each hop from thread to thread costs more than a whole round. So a loop is stepped by whoever has
// a reason to: a caller that has just brought the last tensor of a group, a caller that waits for
// its result, or the loop's own thread, for what nobody waits for. At each time one of them holds
// the loop; nobody waits to get it. Three rules make sure that nothing is left lying:
//   1. who puts something into the inbox then takes the loop and steps it, or calls the thread;
//   2. who lets go of the loop looks into the inbox once more, and calls the thread if something
//      has come, since those who brought it found the loop taken;
//      So too when the thread must come (Demand): it may have found the loop taken;
//   3. who lets go of it while messages are awaited gives the transport's bell back to the thread,
//      and calls it if something rang since the last look, or if the last step moved something:
//      what that has made possible (the next group of the queue, a round whose last rank this was)
//      rings nowhere.
// A thread that finds the loop taken may sleep past the time at which it was to wake, so it says
// that it sleeps for long before it looks once more.
// The bell is muted while a caller steps, and while nothing is awaited: what a peer sends then is
// found by the next step. Callbacks that a step has caused run when the loop has been let go.
class Loop {
 public:
  virtual ~Loop() = default;
  Loop(const Loop&) = delete;

  // The loop in a caller's hands. The caller holds no lock of its own, and is in no callback.
  class Session {
   public:
    // Takes the loop unless somebody else has it.
    explicit Session(Loop* loop) : loop_(loop) { Retake(); }
    ~Session() { Release(); }
    Session(const Session&) = delete;
    explicit operator bool() const { return held_; }
    bool Retake();
    // True if something moved. Never throws: what a step throws ends the loop in its own thread.
    bool Step();
    bool AwaitsMessages() const;  // only while held
    void Release();

   private:
    Loop* const loop_;
    bool held_ = false;
    uint32_t ticket_ = 0;  // of before the last step
    bool moved_ = false;   // by the last step
  };

  // The thread looks at once, unless somebody has the loop.
  void Call() { transport_.bell().Call(); }
  // The thread steps next, as soon as nobody has the loop.
  void Demand() {
    demanded_.store(true, std::memory_order_seq_cst);
    Call();
  }
  bool HasInbox() const { return inbox_full_.load(std::memory_order_seq_cst); }

 protected:
  // spins: whether the thread does before it sleeps; see Backoff.
  Loop(comm::Transport& transport, std::shared_ptr<Completions> completions, bool spins = true)
      : transport_(transport), completions_(std::move(completions)), spins_(spins) {}

  // The body of the thread. Returns when Ended, throws what a step threw, in this thread or a
  // caller's; from then on the loop is this thread's alone.
  void Drive();
  // By the thread, before Drive: it runs on this core from here; -1: where it may. Warns if it
  // cannot.
  static void BindThread(int core);

  // The following are called by whoever holds the loop.
  virtual bool Step() = 0;                  // true if something moved
  virtual bool AwaitsMessages() const = 0;  // an arrival can move something
  virtual Nanos NextWake() const = 0;       // when to step although nothing rings
  virtual bool Ended() = 0;                 // asked by the thread after each step
  // When the next message is likely to come; 0: not known.
  virtual Nanos ExpectedArrival() const { return 0; }

  // By the thread, after each of its steps, when it has let go of the loop.
  virtual void AfterStep() {}
  // The thread leaves the step's callbacks to the completions thread: more is to be moved.
  virtual bool Hurried() const { return false; }

  void SetInboxFull(bool full) { inbox_full_.store(full, std::memory_order_seq_cst); }

  comm::Transport& transport_;
  const std::shared_ptr<Completions> completions_;

 private:
  bool Take() { return !taken_.exchange(true, std::memory_order_seq_cst); }
  void LetGo(uint32_t ticket, bool moved);

  const bool spins_;
  std::atomic<bool> taken_{false};
  std::atomic<bool> inbox_full_{false};
  std::atomic<bool> demanded_{false};
  Status broken_;                      // what a caller's step threw
  std::atomic<Nanos> thread_wake_{0};  // until when the thread may sleep
};

}  // namespace gradred::engine
