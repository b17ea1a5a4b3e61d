// A set of ranks as ascending, separate ranges: a few bytes where thousands of ranks hold the same
// thing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"

namespace gradred::core {

class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(int rank) : ranges_{{rank, rank}} {}

  void Add(const RankSet& other);
  bool empty() const { return ranges_.empty(); }
  int lowest() const { return ranges_.front().first; }
  const std::vector<std::pair<int, int>>& ranges() const { return ranges_; }

  void Put(Writer* out) const;
  static RankSet Get(Reader* in);  // kTransportError unless canonical and not empty

  // "rank 0, 2-3" in the numbers of the world; long lists end in the number of ranks.
  std::string Describe(const std::vector<int>& world_ranks) const;

 private:
  std::vector<std::pair<int, int>> ranges_;  // [first, last]; neither touching nor overlapping
};

}  // namespace gradred::core
