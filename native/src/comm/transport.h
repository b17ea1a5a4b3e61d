// Seam: messages between ranks. Algorithms and communicators are written over it once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/doorbell.h"
#include "base/status.h"

namespace gradred::comm {

class NativeReduce;  // comm/native_reduce.h

// Something that finishes later. It has no thread of its own: it advances when polled, by one
// thread. Memory handed to the call that made a Work stays valid until the Work has finished. A
// Work that is destroyed unfinished leaves its memory to whatever is still running, so the owner
// must keep (leak) that memory: only done after an engine error.
class Work {
 public:
  virtual ~Work() = default;
  // True once finished, well or not. Never blocks, never throws.
  bool Poll() {
    if (!finished_) {
      try {
        finished_ = Advance();
      } catch (...) {
        status_ = CurrentException();
        finished_ = true;
      }
    }
    return finished_;
  }
  const Status& status() const { return status_; }  // meaningful once Poll() is true

 private:
  virtual bool Advance() = 0;  // true when finished; throws Error on failure
  Status status_;
  bool finished_ = false;
};
using WorkPtr = std::unique_ptr<Work>;

// Messages of one (peer, tag) arrive in the order they were sent and match receives in the order
// those were posted. `channel` separates communicators, `sequence` the works of one communicator
// (all its ranks issue them in one order).
struct Tag {
  uint16_t channel = 0;   // < kChannels
  uint16_t sequence = 0;  // < kSequences
};
constexpr int kChannels = 16384,
              kSequences = 128;  // together below 2^21: MPI tags of every library hold them

struct Message {
  int source = -1;
  std::string bytes;
};

// One Transport object is used by one thread at a time; a rank has several objects (control, data,
// side) with separate traffic. Abort and bell() may be used from any thread.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Any size from 0, also beyond 2^31. A received message must have exactly the size posted, else
  // kTransportError naming both. A send may finish before the message is received. Sending to
  // oneself works.
  virtual WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) = 0;
  virtual WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) = 0;

  // Datagrams from any rank, of at most kMaxDatagram bytes, apart from the tagged messages: the
  // side channel. Post never waits (it queues). TakePosted returns false when there is none.
  virtual void Post(int peer, const std::string& bytes) = 0;
  virtual bool TakePosted(Message* message) = 0;

  // Bytes of messages that have left this rank and come to it so far, without datagrams: grows as
  // long as anything moves, so a transfer is stuck only when this stands still. Any thread.
  virtual int64_t moved_nbytes() const = 0;
  // By those who move the ranks' bytes in another way, in shared memory.
  virtual void CountMoved(int64_t /*nbytes*/) {}

  // Moves messages; called by Poll of every Work, and by whoever waits.
  virtual void Progress() = 0;

  // Rung by every arrival that this transport can announce, and by anyone who wants the owner's
  // attention.
  virtual Doorbell& bell() = 0;
  // The bell of `peer`, for those who leave it something in shared memory; null where it cannot be
  // rung from here.
  virtual Doorbell* BellOf(int peer) = 0;
  // False: every event that could finish a Work of this transport rings bell(), so the owner may
  // sleep on it for long. True: some unfinished Work needs polling (MPI), so sleep at most a
  // Backoff's time.
  virtual bool MustPoll() const = 0;

  // From now on every Work, pending and new, finishes with `cause`; the first cause stays. No call
  // reaches an outside library after it. Rings the bell.
  virtual void Abort(const Status& cause) = 0;
  // Throws the cause after Abort: for Works that wait for something other than messages.
  virtual void ThrowIfAborted() = 0;

  // Collective over `members`, ranks of this transport: an allreduce of the library behind it; null
  // where there is none.
  virtual std::shared_ptr<NativeReduce> MakeNative(const std::vector<int>& /*members*/) {
    return nullptr;
  }
};
constexpr int64_t kMaxDatagram = 4096;

// How a thread waits on a transport: 50 us of polling, then sleeps: on the bell, or, while the
// transport must be polled, for 20 us growing to 1 ms. Where the time of the next event is known,
// it sleeps until shortly before it, never longer than 1 ms at once if it must poll, and begins
// anew there: so it tests often where something is likely, and seldom before and long after. Use:
// Reset() when something happened; take the ticket before looking for work.
class Backoff {
 public:
  // spins: yields the core for a while before it sleeps, where the transport has a bell. That saves
  // the way through the kernel if the core is the waiter's own. If not, a thread that computes gets
  // the core, and keeps it for milliseconds, while one that sleeps is woken at once.
  explicit Backoff(bool spins = true) : spins_(spins) {}
  void Reset() { started_ = 0; }
  // When the next event is likely to come; 0: not known.
  void Expect(Nanos when) { expected_ = when; }
  // Returns after a ring, or `limit`, or the next sleep's length. `must_poll`: of the transport,
  // asked while it was the caller's.
  void Pause(Doorbell& bell, uint32_t ticket, bool must_poll, Nanos limit = kForever);
  // What Pause would do at `now`: for how long it sleeps; 0: it only yields the core.
  Nanos NextSleep(Nanos now, bool must_poll, Nanos limit);

 private:
  bool spins_;
  Nanos started_ = 0;
  Nanos sleep_ = 0;
  Nanos expected_ = 0;
};

// Blocks until `work` has finished and returns its status; kTimeout naming `what` when `timeout`
// passes first.
Status Wait(Work& work, Transport& transport, Nanos timeout, const std::string& what);

}  // namespace gradred::comm
