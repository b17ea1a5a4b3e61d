// Memory for results, whose pages have been touched before: a fresh page costs some 4 us, so that
// writing 64 MB of them takes several times as long as reducing as much.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "base/clock.h"

namespace gradred {

// Buffers that are given back are kept for the next taker of that size class. What is in use and
// what is kept are together no more than was in use at once in the last 10 to 20 seconds. Any
// thread; a child process after fork() too, with a copy of its own.
class PagePool {
 public:
  static constexpr int64_t kLeast = 64 << 10;  // smaller buffers come from malloc

  static PagePool& The();  // of the process; never destroyed

  // At least nbytes, aligned to 64 bytes, with any contents. Null: out of memory.
  void* Take(int64_t nbytes);
  void Give(void* data, int64_t nbytes);  // `nbytes` as in Take

  // Gives back to the system what is over the limit by now; cheap.
  void Trim(Nanos now);
  // All that is kept.
  void Release();

  struct Stats {
    int64_t used_nbytes = 0, idle_nbytes = 0;  // taken; kept
    int64_t fresh = 0, reused = 0;             // takes
  };
  Stats stats() const;

 private:
  struct Idle {
    void* data;
    int64_t given;  // the number of the Give: the oldest goes first
  };
  struct Pages {
    void* data;
    int64_t nbytes;
  };
  static int64_t ClassOf(int64_t nbytes);
  static void Unmap(const std::vector<Pages>& pages);
  // With mutex_ held.
  void Age(Nanos now);
  void Use(int64_t nbytes);
  std::vector<Pages> Shrink(int64_t limit);  // of what is kept; for Unmap
  int64_t Limit() const;

  PagePool();

  mutable std::mutex mutex_;
  std::map<int64_t, std::deque<Idle>> idle_;  // by size class, the youngest last
  Stats stats_;
  int64_t gives_ = 0;
  // The most bytes in use at once, in this period and in the one before.
  int64_t most_ = 0, most_before_ = 0;
  Nanos period_start_ = 0;
};

}  // namespace gradred
