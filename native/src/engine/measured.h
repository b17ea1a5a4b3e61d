// What the ranks tell each other about the batches of a planned domain, and what follows from it.
// Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "core/planner.h"
#include "engine/spec.h"

namespace gradred::engine {

// Elements of a kCompare, of which all ranks get the maxima: digest, its negative, and 1 from a
// rank that does not plan. All digests are equal if the first is the negative of the second.
constexpr int kCompared = 3;

// Contents of a kExchange: of each element all ranks get the maximum. A rank that has joined brings
// the smallest int64, which changes none.
struct Measured {
  bool lacking = false;       // a rank has not measured enough
  bool unprobed = false;      // a rank has no costs
  Nanos round = 0;            // the shortest of the ranks: of the last to submit
  int64_t busy_permille = 0;  // of the cores that a rank has
  Nanos end = 0;              // of the last group, from the end of the batch before
  std::vector<Nanos> costs;   // at ProbeSizes
  std::vector<Nanos> ready;   // by position in the caller's list

  static int64_t Count(int costs, int entries) { return 5 + costs + entries; }
  std::vector<int64_t> Encode() const;
  static Measured Decode(const std::vector<int64_t>& values, int costs);
};

enum class SpareCore : uint8_t { kAuto, kYes, kNo };

// Note [Which plan]
// The first exchange gives two candidates: the cuts for ranks that have a core to spare, and for
// those that have none; the one that fits what the processors did comes first. Two more have groups
// of 1 and of 4 MiB, whatever the costs were. Each is tried, and how long its batches took decides:
// a model of costs cannot say how much computation loses to communication beside it, and
// measurements may be disturbed. With what was measured meanwhile one more candidate is made. Those
// within 5 % of the fastest are tried once more, and the shorter of two times counts. Then the
// fastest of all stays; on a difference of less than 1 % the one with fewer groups.
// The next exchanges, after 100, 200, 400 ... 3200 batches, only watch: if batches take 1.2 times
// what they did, all starts again.
class Trials {
 public:
  struct Next {
    ArrangementPtr arrangement;  // to use from now on
    core::Cuts predicted;
    int rest = 0;  // batches before the next ones are measured
  };
  // `measured` is of batches under `current`. nbytes: by position. Changes with what all ranks know
  // alone, so all ranks come to the same.
  Next OnMeasured(const Measured& measured, const ArrangementPtr& current,
                  const std::vector<int64_t>& nbytes, const std::vector<int64_t>& probe_sizes,
                  SpareCore spare_core);

 private:
  struct Trial {
    ArrangementPtr arrangement;
    core::Cuts predicted;
    Nanos end = 0;
  };
  bool Known(const Arrangement& arrangement) const;
  Next Settle();
  int NextRest();
  void AddCandidates();
  void AddFinals();
  Nanos BestEnd() const;
  void AddCandidate(core::Cuts cuts);
  core::Cuts CutsFor(bool spare_core);
  core::Cuts CutsOf(int64_t nbytes);

  std::vector<Trial> tried_, waiting_;
  int generation_ = 0;
  bool finals_ = false;
  Nanos settled_end_ = 0;  // 0: not settled
  int rest_ = 0;
  // Of the last exchange.
  core::PlanProblem problem_;
  std::vector<int> order_;
  bool spare_core_ = true;
};

// By ready time, then by position.
std::vector<int> ReadyOrder(const std::vector<Nanos>& ready);
// Entries and times in the order of an arrangement.
core::PlanProblem ProblemOf(const Measured& measured, const std::vector<int>& order,
                            const std::vector<int64_t>& nbytes,
                            const std::vector<int64_t>& probe_sizes, bool spare_core);

}  // namespace gradred::engine
