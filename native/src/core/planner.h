// Cuts a list of entries into groups so that the last one ends early and the groups cost little.
// Pure, integers only: ranks that ask the same get the same.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace gradred::core {

// How long a group of that many bytes takes from its start to its end: measured at some sizes,
// linear between two of them, constant below the first, and beyond the last as steep as before it.
// Sizes that follow each other in equal ratios make that linear in log size for what is
// proportional to size, and follow the jumps where a cache ends; one line through all of them is
// off by 5 to 10 times.
class CostTable {
 public:
  using Knot = std::pair<int64_t, Nanos>;  // bytes, time
  CostTable() = default;
  // Sizes ascending. A time above that of a larger size is lowered to it: what disturbs a
  // measurement adds to it.
  explicit CostTable(std::vector<Knot> knots);
  Nanos At(int64_t nbytes) const;  // 0 for an empty table
  const std::vector<Knot>& knots() const { return knots_; }

 private:
  std::vector<Knot> knots_;
};

// Times count from the end of the previous batch.
struct PlanProblem {
  std::vector<int64_t> nbytes;  // by entry, in the order in which they travel
  std::vector<Nanos> ready;     // when the last rank has the entry
  CostTable cost;
  CostTable tail;          // what the last group takes after its end; empty: nothing
  Nanos round = 0;         // from ready everywhere to the start
  bool spare_core = true;  // false: communication holds the computation up for as long as it takes
};

struct GroupTimes {
  Nanos start = 0, end = 0;
};

struct Cuts {
  std::vector<int> group_ends;
  std::vector<GroupTimes> times;  // by group
  Nanos end = 0;                  // of the last group, with its tail
  Nanos total = 0;                // of all groups' costs
};

// Note [Objective of the planner]
// A group j of entries that are ready at R_j starts at max(R_j + round, end of the group before)
// and takes cost(bytes). With a spare core: the least total cost among the cuts that end at most
// 1 % later than the earliest possible, then the fewest groups, then the earliest end. Without the
// 1 % the same end was reached with three times the work. Without a spare core each group delays
// what is ready after it by its cost: the earliest end among the cuts that cost at most 1 % more
// than the cheapest, then the fewest groups, then the least cost.
//
// Exact for up to 256 entries, unless more than 64 partial plans that none beats in end, total and
// groups meet at one entry; then every other one goes. More entries are first merged with their
// neighbours, up to 1/128 of the bytes and of the time: at most 385 units are left, so the work is
// bounded whatever the number of entries.
Cuts PlanGroups(const PlanProblem& problem);

// The times of given cuts.
Cuts Predict(const PlanProblem& problem, std::vector<int> group_ends);

}  // namespace gradred::core
