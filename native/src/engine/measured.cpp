#include "engine/measured.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gradred::engine {
namespace {

constexpr int64_t kBusyPermille = 900;  // busier than that: no core to spare
constexpr int64_t kPlainNbytes[] = {1 << 20, 4 << 20};
constexpr int kFirstRest = 100, kLongestRest = 3200;
constexpr int kGenerations = 2;  // how often candidates are made before one is chosen
constexpr int kFinalShare = 20;  // slower than the fastest by 1/20 at most: tried once more

// The same groups whatever the order inside them: entries of a group in the order of the list.
ArrangementPtr Arrange(const std::vector<int>& order, const std::vector<int>& group_ends) {
  auto arrangement = std::make_shared<Arrangement>(Arrangement{order, group_ends});
  int first = 0;
  for (const int end : group_ends) {
    std::sort(arrangement->order.begin() + first, arrangement->order.begin() + end);
    first = end;
  }
  return arrangement;
}

bool SameGroups(const Arrangement& a, const Arrangement& b) {
  return a.group_ends == b.group_ends &&
         Arrange(a.order, a.group_ends)->order == Arrange(b.order, b.group_ends)->order;
}

}  // namespace

std::vector<int64_t> Measured::Encode() const {
  std::vector<int64_t> values{lacking, unprobed, -round, busy_permille, end};
  values.insert(values.end(), costs.begin(), costs.end());
  values.insert(values.end(), ready.begin(), ready.end());
  return values;
}

Measured Measured::Decode(const std::vector<int64_t>& values, int costs) {
  Measured measured;
  measured.lacking = values[0] > 0;
  measured.unprobed = values[1] > 0;
  measured.round = std::max<Nanos>(0, -values[2]);
  measured.busy_permille = values[3];
  measured.end = values[4];
  measured.costs.assign(values.begin() + 5, values.begin() + 5 + costs);
  measured.ready.assign(values.begin() + 5 + costs, values.end());
  return measured;
}

std::vector<int> ReadyOrder(const std::vector<Nanos>& ready) {
  std::vector<int> order(ready.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&ready](int a, int b) { return ready[a] < ready[b]; });
  return order;
}

core::PlanProblem ProblemOf(const Measured& measured, const std::vector<int>& order,
                            const std::vector<int64_t>& nbytes,
                            const std::vector<int64_t>& probe_sizes, bool spare_core) {
  core::PlanProblem problem;
  for (const int position : order) {
    problem.nbytes.push_back(nbytes[position]);
    problem.ready.push_back(measured.ready[position]);
  }
  std::vector<core::CostTable::Knot> knots;
  for (size_t k = 0; k < probe_sizes.size(); ++k)
    knots.emplace_back(probe_sizes[k], measured.costs[k]);
  problem.cost = core::CostTable(std::move(knots));
  problem.round = measured.round;
  problem.spare_core = spare_core;
  return problem;
}

bool Trials::Known(const Arrangement& arrangement) const {
  const auto same = [&](const Trial& trial) { return SameGroups(*trial.arrangement, arrangement); };
  return std::any_of(tried_.begin(), tried_.end(), same) ||
         std::any_of(waiting_.begin(), waiting_.end(), same);
}

void Trials::AddCandidate(core::Cuts cuts) {
  ArrangementPtr arrangement = Arrange(order_, cuts.group_ends);
  if (!Known(*arrangement)) waiting_.push_back({std::move(arrangement), std::move(cuts), 0});
}

core::Cuts Trials::CutsFor(bool spare_core) {
  problem_.spare_core = spare_core;
  return core::PlanGroups(problem_);
}

core::Cuts Trials::CutsOf(int64_t nbytes) {
  std::vector<int> ends;
  int64_t held = 0;
  for (size_t i = 0; i < problem_.nbytes.size(); ++i) {
    if (held > 0 && held + problem_.nbytes[i] > nbytes) {
      ends.push_back(static_cast<int>(i));
      held = 0;
    }
    held += problem_.nbytes[i];
  }
  ends.push_back(static_cast<int>(problem_.nbytes.size()));
  return core::Predict(problem_, std::move(ends));
}

void Trials::AddCandidates() {
  AddCandidate(CutsFor(spare_core_));
  if (generation_ == 0) {
    AddCandidate(CutsFor(!spare_core_));
    for (const int64_t nbytes : kPlainNbytes) AddCandidate(CutsOf(nbytes));
  }
  ++generation_;
}

void Trials::AddFinals() {
  const Nanos best = BestEnd();
  for (const Trial& trial : tried_)
    if (trial.end <= best + best / kFinalShare) waiting_.push_back(trial);
  if (waiting_.size() == 1) waiting_.clear();
  finals_ = true;
}

Nanos Trials::BestEnd() const {
  Nanos best = tried_.front().end;
  for (const Trial& trial : tried_) best = std::min(best, trial.end);
  return best;
}

Trials::Next Trials::OnMeasured(const Measured& measured, const ArrangementPtr& current,
                                const std::vector<int64_t>& nbytes,
                                const std::vector<int64_t>& probe_sizes, SpareCore spare_core) {
  spare_core_ = spare_core == SpareCore::kAuto ? measured.busy_permille <= kBusyPermille
                                               : spare_core == SpareCore::kYes;
  if (settled_end_ > 0) {
    if (measured.end <= settled_end_ + settled_end_ / 5)
      return {current,
              core::Predict(ProblemOf(measured, current->order, nbytes, probe_sizes, spare_core_),
                            current->group_ends),
              NextRest()};
    *this = Trials();
    return OnMeasured(measured, current, nbytes, probe_sizes, spare_core);
  }
  const auto known = std::find_if(tried_.begin(), tried_.end(), [&](const Trial& trial) {
    return trial.arrangement->Digest() == current->Digest();
  });
  core::Cuts predicted = core::Predict(
      ProblemOf(measured, current->order, nbytes, probe_sizes, spare_core_), current->group_ends);
  if (known != tried_.end())
    known->end = std::min(known->end, measured.end);  // what disturbs a measurement adds to it
  else
    tried_.push_back({current, std::move(predicted), measured.end});

  order_ = ReadyOrder(measured.ready);
  problem_ = ProblemOf(measured, order_, nbytes, probe_sizes, spare_core_);
  if (waiting_.empty() && generation_ < kGenerations) AddCandidates();
  if (waiting_.empty() && generation_ == kGenerations && !finals_) AddFinals();
  if (!waiting_.empty()) {
    Trial next = std::move(waiting_.front());
    waiting_.erase(waiting_.begin());
    return {next.arrangement, next.predicted, 0};
  }
  return Settle();
}

Trials::Next Trials::Settle() {
  const Nanos best_end = BestEnd();
  const Trial* best = nullptr;
  for (const Trial& trial : tried_) {
    if (trial.end > best_end + best_end / 100) continue;
    if (!best || trial.arrangement->group_ends.size() < best->arrangement->group_ends.size())
      best = &trial;
  }
  settled_end_ = best->end;
  return {best->arrangement, best->predicted, NextRest()};
}

int Trials::NextRest() { return rest_ = std::clamp(2 * rest_, kFirstRest, kLongestRest); }

}  // namespace gradred::engine
