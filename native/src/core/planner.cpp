#include "core/planner.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace gradred::core {
namespace {

constexpr int kExactEntries = 256;
constexpr int kUnitShare = 128;
constexpr size_t kMostStates = 64;
constexpr Nanos kNever = std::numeric_limits<Nanos>::min() / 4;
constexpr Nanos kFar = std::numeric_limits<Nanos>::max() / 4;

Nanos WithTolerance(Nanos best) { return best + best / 100; }

// Entries [ends[u - 1], ends[u]) are never cut apart.
std::vector<int> Units(const PlanProblem& problem) {
  const int n = static_cast<int>(problem.nbytes.size());
  std::vector<int> ends;
  if (n <= kExactEntries) {
    for (int i = 1; i <= n; ++i) ends.push_back(i);
    return ends;
  }
  int64_t total = 0;
  for (const int64_t nbytes : problem.nbytes) total += nbytes;
  const auto [first, last] = std::minmax_element(problem.ready.begin(), problem.ready.end());
  const Nanos most_time = (*last - *first) / kUnitShare;
  int64_t held = 0;
  Nanos since = problem.ready[0];
  for (int i = 0; i < n; ++i) {
    if (held > 0 &&
        (held + problem.nbytes[i] > total / kUnitShare || problem.ready[i] - since > most_time)) {
      ends.push_back(i);
      held = 0;
      since = problem.ready[i];
    }
    held += problem.nbytes[i];
  }
  ends.push_back(n);
  return ends;
}

// The problem over units: group (i, j] holds the units i + 1 ... j.
class Search {
 public:
  explicit Search(const PlanProblem& problem)
      : problem_(problem), ends_(Units(problem)), m_(static_cast<int>(ends_.size())) {
    bytes_.assign(m_ + 1, 0);
    ready_.assign(m_ + 1, 0);
    int entry = 0;
    for (int u = 1; u <= m_; ++u) {
      bytes_[u] = bytes_[u - 1];
      ready_[u] = ready_[u - 1];
      for (; entry < ends_[u - 1]; ++entry) {
        bytes_[u] += problem.nbytes[entry];
        ready_[u] = std::max(ready_[u], problem.ready[entry]);
      }
    }
    costs_.resize(static_cast<size_t>(m_ + 1) * (m_ + 1));
    for (int i = 0; i < m_; ++i)
      for (int j = i + 1; j <= m_; ++j)
        costs_[Index(i, j)] = problem_.cost.At(bytes_[j] - bytes_[i]);
    rest_.assign(m_ + 1, 0);
    for (int i = m_ - 1; i >= 0; --i) {
      rest_[i] = kFar;
      for (int j = i + 1; j <= m_; ++j) rest_[i] = std::min(rest_[i], Cost(i, j) + rest_[j]);
    }
  }

  std::vector<int> Run() {
    SetLimits();
    std::vector<std::vector<State>> states(m_ + 1);
    states[0].push_back({0, 0, 0, -1, -1});
    for (int j = 1; j <= m_; ++j) {
      for (int i = 0; i < j; ++i)
        for (size_t s = 0; s < states[i].size(); ++s) {
          State next = Extend(states[i][s], i, j);
          if (!Allowed(next, j)) continue;
          next.unit = i;
          next.state = static_cast<int>(s);
          Insert(next, &states[j]);
        }
      Thin(&states[j]);
    }
    const State* best = nullptr;
    for (const State& state : states[m_])
      if (!best || Before(state, *best)) best = &state;
    if (!best) return {ends_.back()};  // Thin has dropped the few that led here in time
    std::vector<int> group_ends;
    int at = m_;
    while (best->unit >= 0) {
      group_ends.push_back(ends_[at - 1]);
      at = best->unit;
      best = &states[at][best->state];
    }
    std::reverse(group_ends.begin(), group_ends.end());
    return group_ends;
  }

 private:
  // A plan of the first units. `end` includes the tail at the last unit.
  struct State {
    Nanos end, total;
    int groups;
    int unit, state;  // before its last group
  };

  size_t Index(int i, int j) const { return static_cast<size_t>(i) * (m_ + 1) + j; }
  Nanos Cost(int i, int j) const { return costs_[Index(i, j)]; }
  Nanos Tail(int i, int j) const { return j == m_ ? problem_.tail.At(bytes_[j] - bytes_[i]) : 0; }
  Nanos Ready(int j) const { return ready_[j] + problem_.round; }

  State Extend(const State& state, int i, int j) const {
    const Nanos delay = problem_.spare_core ? 0 : state.total;
    const Nanos start = std::max(Ready(j) + delay, state.end);
    return {start + Cost(i, j) + Tail(i, j), state.total + Cost(i, j), state.groups + 1, 0, 0};
  }

  bool Allowed(const State& state, int j) const {
    return state.end <= latest_[j] && state.total + rest_[j] <= most_total_;
  }

  // latest_[j]: when the first j units must have ended for the rest to end in time; most_total_: a
  // total that can be kept.
  void SetLimits() {
    latest_.assign(m_ + 1, kFar);
    if (!problem_.spare_core) {
      most_total_ = WithTolerance(rest_[0]);
      return;
    }
    std::vector<Nanos> earliest(m_ + 1, kFar);
    earliest[0] = 0;
    for (int j = 1; j <= m_; ++j)
      for (int i = 0; i < j; ++i)
        earliest[j] =
            std::min(earliest[j], std::max(Ready(j), earliest[i]) + Cost(i, j) + Tail(i, j));
    latest_.assign(m_ + 1, kNever);
    latest_[m_] = WithTolerance(earliest[m_]);
    for (int i = m_ - 1; i >= 0; --i)
      for (int j = i + 1; j <= m_; ++j) {
        const Nanos start = latest_[j] - Cost(i, j) - Tail(i, j);
        if (Ready(j) <= start) latest_[i] = std::max(latest_[i], start);
      }
    // The cheapest way to each unit in turn is a plan that ends in time: no plan need cost more.
    std::vector<State> cheapest(m_ + 1, State{0, kFar, 0, -1, -1});
    cheapest[0].total = 0;
    for (int j = 1; j <= m_; ++j)
      for (int i = 0; i < j; ++i) {
        if (cheapest[i].total == kFar) continue;
        const State next = Extend(cheapest[i], i, j);
        if (next.end > latest_[j]) continue;
        if (next.total < cheapest[j].total ||
            (next.total == cheapest[j].total && next.end < cheapest[j].end))
          cheapest[j] = next;
      }
    most_total_ = cheapest[m_].total;
  }

  static void Insert(const State& state, std::vector<State>* states) {
    for (const State& other : *states)
      if (other.end <= state.end && other.total <= state.total && other.groups <= state.groups)
        return;
    states->erase(std::remove_if(states->begin(), states->end(),
                                 [&state](const State& other) {
                                   return state.end <= other.end && state.total <= other.total &&
                                          state.groups <= other.groups;
                                 }),
                  states->end());
    states->push_back(state);
    if (states->size() > 4 * kMostStates) Thin(states);
  }

  static void Thin(std::vector<State>* states) {
    std::sort(states->begin(), states->end(), [](const State& a, const State& b) {
      return std::tie(a.total, a.end, a.groups) < std::tie(b.total, b.end, b.groups);
    });
    while (states->size() > kMostStates) {
      size_t kept = 0;
      for (size_t s = 0; s < states->size(); s += 2) (*states)[kept++] = (*states)[s];
      states->resize(kept);
    }
  }

  bool Before(const State& a, const State& b) const {
    if (problem_.spare_core)
      return std::tie(a.total, a.groups, a.end) < std::tie(b.total, b.groups, b.end);
    return std::tie(a.end, a.groups, a.total) < std::tie(b.end, b.groups, b.total);
  }

  const PlanProblem& problem_;
  const std::vector<int> ends_;
  const int m_;
  std::vector<int64_t> bytes_;  // of the first units
  std::vector<Nanos> ready_;    // all of the first units
  std::vector<Nanos> costs_;
  std::vector<Nanos> rest_;  // the cheapest total of the units from here on
  std::vector<Nanos> latest_;
  Nanos most_total_ = kFar;
};

}  // namespace

CostTable::CostTable(std::vector<Knot> knots) : knots_(std::move(knots)) {
  for (size_t k = knots_.size(); k > 1; --k)
    knots_[k - 2].second = std::min(knots_[k - 2].second, knots_[k - 1].second);
}

Nanos CostTable::At(int64_t nbytes) const {
  if (knots_.empty()) return 0;
  if (nbytes <= knots_.front().first || knots_.size() == 1) return knots_.front().second;
  size_t k = 1;
  while (k + 1 < knots_.size() && nbytes > knots_[k].first) ++k;
  const auto [size, time] = knots_[k - 1];
  const __int128 rise = knots_[k].second - time;
  return time + static_cast<Nanos>(rise * (nbytes - size) / (knots_[k].first - size));
}

Cuts Predict(const PlanProblem& problem, std::vector<int> group_ends) {
  Cuts cuts;
  int entry = 0;
  Nanos ready = 0, before = 0;
  for (const int end : group_ends) {
    int64_t nbytes = 0;
    for (; entry < end; ++entry) {
      nbytes += problem.nbytes[entry];
      ready = std::max(ready, problem.ready[entry]);
    }
    const Nanos delay = problem.spare_core ? 0 : cuts.total;
    const Nanos cost = problem.cost.At(nbytes);
    GroupTimes times;
    times.start = std::max(ready + delay + problem.round, before);
    times.end = before = times.start + cost;
    cuts.times.push_back(times);
    cuts.total += cost;
    cuts.end = times.end + problem.tail.At(nbytes);
  }
  cuts.group_ends = std::move(group_ends);
  return cuts;
}

Cuts PlanGroups(const PlanProblem& problem) {
  if (problem.nbytes.empty()) return {};
  return Predict(problem, Search(problem).Run());
}

}  // namespace gradred::core
