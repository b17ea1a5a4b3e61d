// Memory of the slots of one process set: ranges of a few segments.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "comm/communicator.h"

namespace gradred::engine {

// The ranges of one piece of memory that nobody has. What is free depends on what is taken alone,
// not on the order in which it was given back.
class FreeRanges {
 public:
  explicit FreeRanges(int64_t nbytes) : nbytes_(nbytes) { Give(0, nbytes); }
  // Where the first range that is large enough begins, taken from now on; -1: none is.
  int64_t Take(int64_t nbytes);
  void Give(int64_t begin, int64_t nbytes);
  bool all() const { return ranges_.count(0) > 0 && ranges_.at(0) == nbytes_; }

 private:
  int64_t nbytes_;
  std::map<int64_t, int64_t> ranges_;  // ends by begins; no two touch
};

// Note [Arenas]
// A segment costs a file descriptor, and a mapping in each process of the node, so slots are ranges
// of arenas: the first has kFirst bytes, and each later one as many as all before it together, at
// most 13 of them within 64 MiB. An arena of which nothing is taken is freed.
//
// Ranges begin at multiples of kApart, two cache lines: what one thread packs shares no line with
// what another one packs or a peer writes, nor is it the other line of a pair that is prefetched.
class Arenas {
 public:
  static constexpr int64_t kFirst = 16 << 10;  // bytes
  static constexpr int64_t kApart = 128;

  struct Range {
    comm::Segment* segment = nullptr;  // null: no range
    int64_t offset = 0, nbytes = 0;
  };

  // budget: bytes of all arenas.
  explicit Arenas(int64_t budget) : budget_(budget) {}

  // No range if no arena has room.
  Range Take(int64_t nbytes);
  void Give(const Range& range);
  // Bytes of the arena to add if there is to be room for so many; 0: the budget forbids it.
  int64_t NextNbytes(int64_t nbytes) const;
  void Add(comm::SegmentPtr segment);
  // The budget is what the arenas have now.
  void GrowNoMore() { budget_ = nbytes_; }
  int64_t nbytes() const { return nbytes_; }  // of all arenas
  size_t size() const { return arenas_.size(); }

 private:
  struct Arena {
    comm::SegmentPtr segment;
    FreeRanges free;
  };
  int64_t budget_;
  std::vector<Arena> arenas_;  // in the order in which they were added
  int64_t nbytes_ = 0;
};

}  // namespace gradred::engine
