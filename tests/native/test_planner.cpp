// The planner against all cuts, and its bounds.
#include <cstdlib>
#include <random>
#include <tuple>

#include "core/planner.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::core;
using testing::Seed;

namespace {

std::vector<Cuts> AllCuts(const PlanProblem& problem) {
  const int n = static_cast<int>(problem.nbytes.size());
  std::vector<Cuts> all;
  for (int bits = 0; bits < 1 << (n - 1); ++bits) {
    std::vector<int> ends;
    for (int i = 1; i < n; ++i)
      if (bits >> (i - 1) & 1) ends.push_back(i);
    ends.push_back(n);
    all.push_back(Predict(problem, std::move(ends)));
  }
  return all;
}

using Score = std::tuple<Nanos, Nanos, Nanos>;

// See Note [Objective of the planner]: what the best cuts have.
Score BruteForce(const PlanProblem& problem) {
  const std::vector<Cuts> all = AllCuts(problem);
  Nanos first = INT64_MAX;
  for (const Cuts& cuts : all) first = std::min(first, problem.spare_core ? cuts.end : cuts.total);
  Score best{INT64_MAX, 0, 0};
  for (const Cuts& cuts : all) {
    if ((problem.spare_core ? cuts.end : cuts.total) > first + first / 100) continue;
    const Nanos groups = static_cast<Nanos>(cuts.group_ends.size());
    best = std::min(best, problem.spare_core ? Score{cuts.total, groups, cuts.end}
                                             : Score{cuts.end, groups, cuts.total});
  }
  return best;
}

Score ScoreOf(const PlanProblem& problem, const Cuts& cuts) {
  const Nanos groups = static_cast<Nanos>(cuts.group_ends.size());
  return problem.spare_core ? Score{cuts.total, groups, cuts.end}
                            : Score{cuts.end, groups, cuts.total};
}

PlanProblem Random(std::mt19937_64& random, int n) {
  const auto below = [&random](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  PlanProblem problem;
  const bool ties = below(3) == 0;  // few different values
  Nanos at = 0;
  for (int i = 0; i < n; ++i) {
    problem.nbytes.push_back(ties ? (1 + below(2)) * 1000 : 1 + below(1 << (4 + below(18))));
    at += ties ? below(2) * 1000 : below(1 << below(20));
    problem.ready.push_back(at);
  }
  if (below(4) == 0)  // not in the order of their times
    for (Nanos& ready : problem.ready) ready = below(at + 1);
  std::vector<CostTable::Knot> knots;
  Nanos time = below(2) * below(30000);
  for (int64_t size = 1000; size <= 1000000; size *= 10) {
    if (ties)
      time = size;  // proportional: all cuts cost the same
    else
      time += below(size / 4 + 1);
    knots.emplace_back(size, time);
  }
  problem.cost = CostTable(knots);
  if (below(3) == 0) problem.tail = CostTable({{1000, below(5000)}, {1000000, below(500000)}});
  problem.round = below(3) * below(20000);
  problem.spare_core = below(2) == 0;
  return problem;
}

}  // namespace

TEST(AgreesWithAllCuts) {
  const uint64_t seed = Seed();
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 600; ++trial) {
    const PlanProblem problem = Random(random, 1 + trial % 12);
    const Cuts cuts = PlanGroups(problem);
    testing::Check(ScoreOf(problem, cuts) == BruteForce(problem),
                   "not the best cuts; GRADRED_TEST_SEED=" + std::to_string(seed) + ", trial " +
                       std::to_string(trial),
                   __FILE__, __LINE__);
    CHECK_EQ(cuts.group_ends.back(), static_cast<int>(problem.nbytes.size()));
    CHECK_EQ(cuts.times.size(), cuts.group_ends.size());
  }
}

TEST(CostsBetweenAndBeyondTheKnots) {
  const CostTable table({{1000, 50}, {4000, 110}, {16000, 100}});
  CHECK_EQ(table.At(1), 50);
  CHECK_EQ(table.At(1000), 50);
  CHECK_EQ(table.At(2500), 75);
  CHECK_EQ(table.At(4000), 100);  // lowered
  CHECK_EQ(table.At(16000), 100);
  CHECK_EQ(table.At(1000000), 100);
  const CostTable steep({{1000, 50}, {2000, 100}});
  CHECK_EQ(steep.At(10000), 500);
  CHECK_EQ(steep.At(int64_t{1} << 50), (int64_t{1} << 50) / 20);
  CHECK_EQ(CostTable({{1000, 50}}).At(5000), 50);
  CHECK_EQ(CostTable().At(5000), 0);
}

TEST(ToleranceSavesWork) {
  // 60 entries that arrive faster than groups of one could travel.
  PlanProblem problem;
  for (int i = 0; i < 60; ++i) {
    problem.nbytes.push_back(100000);
    problem.ready.push_back((i + 1) * 100000);
  }
  problem.cost = CostTable({{4096, 40000}, {1 << 24, 2000000}});
  const Cuts cuts = PlanGroups(problem);
  CHECK(cuts.group_ends.size() < 10);
  CHECK(cuts.end <= 6000000 + problem.cost.At(100000) + 6000000 / 50);
  problem.spare_core = false;
  CHECK_EQ(PlanGroups(problem).group_ends.size(), size_t(1));
}

TEST(TenThousandEntries) {
  PlanProblem problem;
  std::mt19937_64 random(7);
  Nanos at = 0;
  for (int i = 0; i < 10000; ++i) {
    problem.nbytes.push_back(random() % 2 ? 400 : 40000);
    problem.ready.push_back(at += random() % 20000);
  }
  problem.cost =
      CostTable({{4096, 40000}, {1 << 16, 60000}, {1 << 20, 300000}, {1 << 24, 9000000}});
  for (const bool spare : {true, false}) {
    problem.spare_core = spare;
    const Cuts cuts = PlanGroups(problem);
    CHECK_EQ(cuts.group_ends.back(), 10000);
    CHECK(cuts.end < Predict(problem, {10000}).end);
    CHECK(PlanGroups(problem).group_ends == cuts.group_ends);
  }
}

TEST(OneEntryAndNone) {
  PlanProblem problem;
  CHECK(PlanGroups(problem).group_ends.empty());
  problem.nbytes = {0};
  problem.ready = {0};
  CHECK(PlanGroups(problem).group_ends == std::vector<int>{1});
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
