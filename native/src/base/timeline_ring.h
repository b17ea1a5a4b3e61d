// Records of one thread on their way to the file. See Note [Timeline] in base/timeline.h.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/clock.h"

namespace gradred::timeline {

// How an event is drawn.
enum class Shape : uint16_t {
  kSpan,     // [begin, begin + duration] of one thread; spans of a thread nest
  kInstant,  // a point of one thread
  kOpen,     // start and end of a phase, of a batch, a group or a chunk; written on their
  kClose,    // own, by whichever threads they happen on
  kRound,    // a span of a process set's rounds
  kMark,     // a line across all threads of the rank
};

constexpr int32_t kNone = -1;

// What a thread does with the chunks of groups.
enum class Work : uint8_t { kPack, kSum, kUnpack };
constexpr int kWorks = 3;

struct Record {
  Nanos begin = 0;
  Nanos duration = 0;
  const char* name = nullptr;  // a literal
  int64_t nbytes = kNone;
  uint32_t domain = 0, batch = 0;  // 0: of no domain
  int32_t group = kNone, entry = kNone;
  int32_t value = kNone;  // of a round: its words
  uint16_t set = 0;
  Shape shape = Shape::kInstant;
  Nanos extra = 0;

  // Of a phase that closes: see Spent in base/timeline.h. Nothing else needs these three then.
  void SetSpent(const std::array<Nanos, kWorks>& spent) {
    duration = spent[0];
    nbytes = spent[1];
    extra = spent[2];
  }
  std::array<Nanos, kWorks> spent() const { return {duration, nbytes, extra}; }
};
static_assert(sizeof(Record) == 64, "a record is one cache line");

// One writer, which never waits, and one reader. A full ring loses its oldest records.
class Ring {
 public:
  // `capacity`: records, a power of two.
  explicit Ring(size_t capacity) : slots_(capacity), mask_(capacity - 1) {}

  // Writer. Returns how many records lie before this one and have not been taken, at most.
  uint64_t Push(const Record& record) {
    const uint64_t at = written_.load(std::memory_order_relaxed);
    // Announced before the slot changes, so that a reader who saw any of the change knows.
    claimed_.store(at + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    uint64_t words[kWords];
    std::memcpy(words, &record, sizeof(record));
    Slot& slot = slots_[at & mask_];
    for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
    written_.store(at + 1, std::memory_order_release);
    return at - taken_.load(std::memory_order_relaxed);
  }

  // Reader: appends what has come since the last call, in order; returns the number of records that
  // were lost before those.
  uint64_t Take(std::vector<Record>* out) {
    const uint64_t end = written_.load(std::memory_order_acquire);
    const uint64_t from = taken_.load(std::memory_order_relaxed);
    const uint64_t start = std::max(from, end > slots_.size() ? end - slots_.size() : 0);
    const size_t kept = out->size();
    out->reserve(kept + static_cast<size_t>(end - start));
    for (uint64_t at = start; at < end; ++at) {
      uint64_t words[kWords];
      const Slot& slot = slots_[at & mask_];
      for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
      std::memcpy(&out->emplace_back(), words, sizeof(Record));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    // What the writer has begun to overwrite meanwhile may be half of one and half of another.
    const uint64_t claimed = claimed_.load(std::memory_order_relaxed);
    const uint64_t whole = claimed > slots_.size() ? claimed - slots_.size() : 0;
    const uint64_t torn = std::min(whole > start ? whole - start : 0, end - start);
    out->erase(out->begin() + kept, out->begin() + kept + torn);
    taken_.store(end, std::memory_order_relaxed);
    return start - from + torn;
  }

  // Reader: forgets what is there.
  void Skip() { taken_.store(written_.load(std::memory_order_acquire), std::memory_order_relaxed); }

  size_t capacity() const { return slots_.size(); }

 private:
  static constexpr size_t kWords = sizeof(Record) / sizeof(uint64_t);
  struct alignas(64) Slot {
    std::atomic<uint64_t> words[kWords];
  };
  std::vector<Slot> slots_;
  const uint64_t mask_;
  alignas(64) std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> claimed_{0};
  alignas(64) std::atomic<uint64_t> taken_{0};
};

}  // namespace gradred::timeline
