// What a rank does, event by event, in a file for Perfetto and chrome://tracing.
//
// Note [Timeline]
// Whoever does something worth seeing pushes a record of one cache line into a ring of its thread:
// no lock, no allocation, no system call. A thread of low priority writes the rings out a few times
// a second. While nothing is recorded an event costs a load and a branch. Times are of
// CLOCK_MONOTONIC; each rank adds its distance to rank 0's clock when it writes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/timeline_ring.h"

namespace gradred::timeline {

namespace detail {
extern std::atomic<bool> recording;
extern std::atomic<bool> mark_rounds;
void Spend(Work work, Nanos begin, int64_t nbytes);
}  // namespace detail
inline bool Recording() { return detail::recording.load(std::memory_order_relaxed); }

struct Options {
  std::string path;
  int rank = 0, size = 1;
  std::string host;
  Nanos origin = 0;             // of rank 0's clock: 0 in the file
  Nanos clock_offset = 0;       // rank 0's clock minus this rank's
  Nanos clock_uncertainty = 0;  // the offset is right within this
  bool mark_rounds = false;
  bool chunks = false;       // spans of ChunkSpan too
  int ring_records = 16384;  // of a thread
};

// Starts recording into a new file. Throws kInvalidArgument naming path and reason when it cannot
// be written, or when one is being written. One of the process; any thread.
void Start(const Options& options);
// Writes what is left and closes the file; nothing if nothing is recorded.
void Stop();
// Has what was recorded so far written soon.
void Hurry();
std::string Path();  // of the file being written; empty: none

// The name of the calling thread in files, and with "gr-" in the system's lists; a literal. Threads
// without are called "submit".
void NameThread(const char* name);

void Push(const Record& record);

// A fact with a text, for rare ones: a stall, an abort. Any thread; takes a lock.
void Note(const char* name, const std::string& text);

// --- Batches
// One pass over a domain, the `batch`-th since the recording began; 0: not recorded.
struct Tag {
  uint32_t domain = 0, batch = 0;
};

struct GroupInfo {
  int first = 0, last = 0;  // entries [first, last)
  int64_t nbytes = 0;
};
struct DomainInfo {
  std::string name;
  int set = 0;
  std::vector<std::string> labels;  // of entries
  std::vector<GroupInfo> groups;
};
// Counts a batch of the domain `name`. `plan` is what it is cut by: where it is another object than
// for the batch before, `describe` tells what it is, and a change gets into the file.
Tag BeginBatch(const std::string& name, const std::shared_ptr<const void>& plan,
               const std::function<DomainInfo()>& describe);

// --- Events in a line each, free while nothing is recorded

// From here to the end of the block, on this thread. What takes less than `shortest` is left out.
class Span {
 public:
  explicit Span(const char* name, int64_t nbytes = kNone, Tag tag = {}, int group = kNone,
                int entry = kNone, Nanos shortest = 0)
      : shortest_(shortest) {
    if (!Recording()) return;
    record_.name = name;
    record_.nbytes = nbytes;
    record_.domain = tag.domain;
    record_.batch = tag.batch;
    record_.group = group;
    record_.entry = entry;
    record_.shape = Shape::kSpan;
    record_.begin = Now();
  }
  ~Span() {
    if (!record_.name) return;
    record_.duration = Now() - record_.begin;
    if (record_.duration >= shortest_) Push(record_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const Nanos shortest_;
  Record record_;
};

// The same for a piece of a group's way, of which there may be hundreds in a step: the time is
// added up, and written piece by piece only if asked for.
class ChunkSpan {
 public:
  ChunkSpan(Work work, int64_t nbytes)
      : begin_(Recording() ? Now() : 0), nbytes_(nbytes), work_(work) {}
  ~ChunkSpan() {
    if (begin_ != 0) detail::Spend(work_, begin_, nbytes_);
  }
  ChunkSpan(const ChunkSpan&) = delete;
  ChunkSpan& operator=(const ChunkSpan&) = delete;

 private:
  const Nanos begin_;
  const int64_t nbytes_;
  const Work work_;
};
// What this thread has spent in each since the last call.
using Spent = std::array<Nanos, kWorks>;
Spent TakeSpent();

// Something that goes through stages while others of its kind are in theirs: a chunk that moves.
// Begun and ended by any thread, one at a time.
class Stage {
 public:
  // Ends the stage before.
  void Enter(const char* name, int64_t nbytes = kNone) {
    End();
    if (Recording()) Begin(name, nbytes);
  }
  void End() {
    if (record_.name) DoEnd();
  }

 private:
  void Begin(const char* name, int64_t nbytes);
  void DoEnd();
  Record record_;
};

// Rounds of one process set, one after the other.
class Rounds {
 public:
  explicit Rounds(int set) : set_(set) {}
  void Begin(const char* name, size_t words = 0);
  void End(bool productive);

 private:
  const int set_;
  const char* name_ = nullptr;
  Nanos begin_ = 0;
  int words_ = 0;
};

}  // namespace gradred::timeline
