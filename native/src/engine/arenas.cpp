#include "engine/arenas.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace gradred::engine {
namespace {

constexpr int64_t kPage = 4096;

int64_t RoundUp(int64_t nbytes, int64_t to) { return (nbytes + to - 1) / to * to; }

}  // namespace

int64_t FreeRanges::Take(int64_t nbytes) {
  const auto at = std::find_if(ranges_.begin(), ranges_.end(), [nbytes](const auto& range) {
    return range.second - range.first >= nbytes;
  });
  if (at == ranges_.end()) return -1;
  const auto [begin, end] = *at;
  ranges_.erase(at);
  if (begin + nbytes < end) ranges_.emplace(begin + nbytes, end);
  return begin;
}

void FreeRanges::Give(int64_t begin, int64_t nbytes) {
  int64_t end = begin + nbytes;
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && next->first == end) {
    end = next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    ranges_.emplace(begin, end);
  }
}

Arenas::Range Arenas::Take(int64_t nbytes) {
  nbytes = RoundUp(nbytes, kApart);
  for (Arena& arena : arenas_) {
    const int64_t offset = arena.free.Take(nbytes);
    if (offset >= 0) return {arena.segment.get(), offset, nbytes};
  }
  return {};
}

void Arenas::Give(const Range& range) {
  const auto arena = std::find_if(arenas_.begin(), arenas_.end(),
                                  [&](const Arena& a) { return a.segment.get() == range.segment; });
  arena->free.Give(range.offset, range.nbytes);
  if (!arena->free.all()) return;
  nbytes_ -= arena->segment->nbytes();
  arenas_.erase(arena);
}

int64_t Arenas::NextNbytes(int64_t nbytes) const {
  const int64_t rest = budget_ - nbytes_;
  nbytes = RoundUp(nbytes, kPage);
  return nbytes > rest ? 0 : std::max(nbytes, std::min(std::max(kFirst, nbytes_), rest));
}

void Arenas::Add(comm::SegmentPtr segment) {
  const int64_t nbytes = segment->nbytes();
  nbytes_ += nbytes;
  arenas_.push_back({std::move(segment), FreeRanges(nbytes)});
}

}  // namespace gradred::engine
