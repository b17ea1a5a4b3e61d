// A run of a random program over simulated ranks, which checks what the protocol promises.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "protocol_harness.h"
#include "protocol_program.h"

namespace protocol {

struct Outcome {
  int64_t rounds = 0, empty_rounds = 0, fallbacks = 0, runs = 0, failed = 0, unions = 0;
};

enum class State { kNone, kRun, kDone };  // of a group: agreed, its result is here

struct BatchState {  // on one rank
  bool begun = false, ended = false, abandoned = false;
  bool may_run_late = false;  // its words were on the way when it was abandoned
  std::vector<State> groups;
  std::vector<bool> submitted;
  std::string failure;
};

class Runner {
 public:
  Runner(uint64_t seed, const Program& program, const ProgramOptions& options)
      : p_(program), random_(seed ^ 0x5eed) {
    NegotiatorOptions negotiator;
    negotiator.timer = options.timer;
    negotiator.key = seed;
    if (options.retires) negotiator.retire_after = 1 + static_cast<int64_t>(random_() % 6);
    for (size_t set = 0; set < p_.sets.size(); ++set) {
      negotiator.world_ranks = p_.sets[set];
      sets_.push_back(std::make_unique<Set>(
          &clock_, static_cast<int>(p_.sets[set].size()), negotiator,
          [this, set](int rank, const Action& action) {
            OnAction(static_cast<int>(set), p_.sets[set][rank], action);
          },
          random_(), 20 * kMicrosecond, options.waits ? 30 * kMicrosecond : 0));
      runs_.emplace_back(p_.ranks);
      joined_.emplace_back(p_.ranks, 0);
      ended_.emplace_back(p_.ranks, false);
      last_joined_.emplace_back();
    }
    state_.resize(p_.ranks, std::vector<BatchState>(p_.batches.size()));
    started_.resize(p_.ranks, std::vector<Started>(p_.batches.size()));
    epoch_.assign(p_.ranks, 0);
    join_sent_.assign(p_.ranks, false);
    shut_.assign(p_.ranks, false);
  }

  Outcome Run() {
    for (int rank = 0; rank < p_.ranks; ++rank) Advance(rank);
    clock_.RunAll(2'000'000);
    CheckEnd();
    Outcome outcome;
    for (size_t set = 0; set < sets_.size(); ++set) {
      const NegotiatorCounters& first = sets_[set]->at(0).counters();
      int64_t fallbacks = 0;
      for (int rank = 0; rank < sets_[set]->size(); ++rank) {
        CHECK_EQ(sets_[set]->at(rank).TableDigest(), sets_[set]->at(0).TableDigest());
        CHECK_EQ(sets_[set]->at(rank).counters().rounds, first.rounds);
        fallbacks += sets_[set]->at(rank).counters().fallbacks;
      }
      CHECK(first.empty_rounds <= first.rounds - first.empty_rounds + fallbacks);
      outcome.rounds += first.rounds;
      outcome.empty_rounds += first.empty_rounds;
      outcome.unions += first.unions;
      outcome.runs += first.runs;
      outcome.fallbacks += fallbacks;
    }
    for (const auto& rank : state_)
      for (const BatchState& state : rank) outcome.failed += !state.failure.empty();
    return outcome;
  }

 private:
  struct Started {  // delays that are running or over
    bool begin = false, abandon = false;
    std::vector<bool> groups;
  };

  void Send(int set, int rank, const Event& event) {
    const auto& members = p_.sets[set];
    const auto at = std::find(members.begin(), members.end(), rank);
    if (at != members.end()) sets_[set]->Send(static_cast<int>(at - members.begin()), event);
  }

  bool InFlight(int set, int rank) const {
    const auto& members = p_.sets[set];
    return sets_[set]->InFlight(
        static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin()));
  }

  bool Over(int rank, const std::vector<Wait>& waits) const {
    for (const Wait& wait : waits) {
      const BatchState& state = state_[rank][wait.batch];
      if (wait.group < 0 ? !AllDone(state) : !Done(state, wait.group)) return false;
    }
    return true;
  }
  static bool Done(const BatchState& state, int group) {
    return state.begun && (state.groups[group] == State::kDone || !state.failure.empty());
  }
  static bool AllDone(const BatchState& state) {
    for (size_t group = 0; group < state.groups.size(); ++group)
      if (!Done(state, static_cast<int>(group))) return false;
    return state.begun;
  }

  // Starts what this rank's program can start now.
  void Advance(int rank) {
    if (shut_[rank]) return;
    for (size_t b = 0; b < p_.batches.size(); ++b) {
      const BatchTask& task = p_.tasks[rank][b];
      if (!task.takes_part || p_.batches[b].epoch > epoch_[rank]) continue;
      Started& started = started_[rank][b];
      const BatchState& state = state_[rank][b];
      const int batch = static_cast<int>(b);
      if (!started.begin && Over(rank, task.before_begin)) {
        started.begin = true;
        started.groups.assign(task.groups.size(), false);
        clock_.Post(task.begin_delay, [this, rank, batch] { OnBegin(rank, batch); });
      }
      if (!state.begun) continue;
      for (size_t group = 0; group < task.groups.size(); ++group) {
        if (started.groups[group] || !Over(rank, task.groups[group].before)) continue;
        started.groups[group] = true;
        const int g = static_cast<int>(group);
        clock_.Post(task.groups[group].delay, [this, rank, batch, g] { OnReady(rank, batch, g); });
      }
      if (task.abandons && !started.abandon) {
        started.abandon = true;
        clock_.Post(task.abandon_delay, [this, rank, batch] { OnAbandon(rank, batch); });
      }
    }
    MaybeLeave(rank);
  }

  void OnBegin(int rank, int b) {
    if (shut_[rank]) return;
    BatchState& state = state_[rank][b];
    const BatchPlan& plan = p_.batches[b];
    state.begun = true;
    state.groups.assign(plan.groups(rank), State::kNone);
    state.submitted.assign(plan.groups(rank), false);
    current_[{plan.set, rank, plan.name()}] = b;
    Send(plan.set, rank, Begin{plan.variants[plan.choice[rank]]});
    Advance(rank);
  }

  void OnReady(int rank, int b, int group) {
    BatchState& state = state_[rank][b];
    if (shut_[rank] || state.ended || state.abandoned) return;
    state.submitted[group] = true;
    Send(p_.batches[b].set, rank, Ready{p_.batches[b].name(), group});
    MaybeLeave(rank);
  }

  void OnAbandon(int rank, int b) {
    BatchState& state = state_[rank][b];
    if (shut_[rank] || state.ended) return;
    state.abandoned = true;
    state.may_run_late = InFlight(p_.batches[b].set, rank);
    Send(p_.batches[b].set, rank, Abandon{p_.batches[b].name(), "an op failed"});
  }

  // Join when the epoch's batches have begun, Shutdown after the last epoch or before the batch in
  // the program.
  void MaybeLeave(int rank) {
    if (shut_[rank] || join_sent_[rank]) return;
    bool begun = true, done = true;
    for (size_t b = 0; b < p_.batches.size(); ++b) {
      if (!p_.tasks[rank][b].takes_part || p_.batches[b].epoch != epoch_[rank]) continue;
      begun = begun && state_[rank][b].begun;
      done = done && AllDone(state_[rank][b]);
    }
    const int until = p_.shutdown_at[rank];
    const bool to_the_end = until == static_cast<int>(p_.batches.size());
    if (p_.joins && epoch_[rank] < (to_the_end ? p_.epochs : p_.batches[until].epoch)) {
      if (!begun || (p_.join_waits[rank][epoch_[rank]] && !done)) return;
      join_sent_[rank] = true;
      joining_[rank] = 0;
      for (size_t set = 0; set < sets_.size(); ++set) joining_[rank] += Member(set, rank);
      for (size_t set = 0; set < sets_.size(); ++set) Send(static_cast<int>(set), rank, Join{});
      return;
    }
    if (!begun || (p_.shutdown_waits[rank] && !done)) return;
    shut_[rank] = true;
    for (size_t set = 0; set < sets_.size(); ++set)
      Send(static_cast<int>(set), rank, Shutdown{"the program is over"});
  }

  bool Member(size_t set, int rank) const {
    return std::count(p_.sets[set].begin(), p_.sets[set].end(), rank) > 0;
  }

  void OnAction(int set, int rank, const Action& action) {
    if (const auto* run = std::get_if<struct Run>(&action)) OnRun(set, rank, *run);
    if (const auto* fail = std::get_if<Fail>(&action)) OnFail(set, rank, *fail);
    if (const auto* joined = std::get_if<AllJoined>(&action)) OnAllJoined(set, rank, *joined);
    if (std::get_if<AllShutDown>(&action)) {
      CHECK(!ended_[set][rank]);
      ended_[set][rank] = true;
    }
  }

  void OnRun(int set, int rank, const struct Run& run) {
    const std::string& name = run.declaration->name;
    const auto at = current_.find({set, rank, name});
    const bool mine = at != current_.end() && !state_[rank][at->second].ended;
    CHECK_EQ(run.mine, mine);
    CHECK(run.mine || run.someone_joined);
    runs_[set][rank].push_back({name, run.group, mine ? at->second : -1});
    if (!mine) return;
    const int b = at->second;
    BatchState& state = state_[rank][b];
    CHECK(state.submitted[run.group] && state.groups[run.group] == State::kNone);
    CHECK(!state.abandoned || state.may_run_late);
    CHECK(run.declaration == p_.batches[b].variants[p_.batches[b].choice[rank]]);
    state.groups[run.group] = State::kRun;
    state.ended = std::count(state.groups.begin(), state.groups.end(), State::kNone) == 0;
    const int group = run.group;
    clock_.Post(100 * kMicrosecond + static_cast<Nanos>(random_() % 50) * kMicrosecond,
                [this, rank, b, group] {
                  state_[rank][b].groups[group] = State::kDone;
                  Advance(rank);
                });
  }

  void OnFail(int set, int rank, const Fail& fail) {
    const int b = current_.at({set, rank, fail.domain});
    BatchState& state = state_[rank][b];
    CHECK(state.begun && !state.ended);
    CHECK(!fail.status.ok() && !IsEngineError(fail.status.kind()));
    state.ended = true;
    state.failure = fail.status.ToString();
    clock_.Post(0, [this, rank] { Advance(rank); });
  }

  void OnAllJoined(int set, int rank, const AllJoined& joined) {
    CHECK(join_sent_[rank]);
    const size_t nth = static_cast<size_t>(joined_[set][rank]++);
    auto& last = last_joined_[set];
    if (nth == last.size()) last.push_back(joined.last_rank);
    CHECK_EQ(last[nth], joined.last_rank);
    if (--joining_[rank] > 0) return;
    clock_.Post(0, [this, rank] {
      join_sent_[rank] = false;
      ++epoch_[rank];
      Advance(rank);
    });
  }

  void CheckEnd() const {
    for (size_t set = 0; set < sets_.size(); ++set) {
      const auto& members = p_.sets[set];
      for (const int rank : members) {
        CHECK(ended_[set][rank]);
        CheckSameRuns(static_cast<int>(set), members[0], rank);
      }
    }
    for (size_t b = 0; b < p_.batches.size(); ++b) CheckBatch(static_cast<int>(b));
  }

  // The same groups in the same order; and where several ranks bring data, of the same batch.
  void CheckSameRuns(int set, int a, int b) const {
    CHECK_EQ(runs_[set][a].size(), runs_[set][b].size());
    for (size_t i = 0; i < runs_[set][a].size(); ++i) {
      const RunSeen &x = runs_[set][a][i], &y = runs_[set][b][i];
      CHECK_EQ(x.name, y.name);
      CHECK_EQ(x.group, y.group);
      CHECK(x.batch < 0 || y.batch < 0 || x.batch == y.batch);
    }
  }

  // Ended alike on all ranks that took part, with every group run once or failed.
  void CheckBatch(int b) const {
    const BatchState* first = nullptr;
    for (int rank = 0; rank < p_.ranks; ++rank) {
      const BatchState& state = state_[rank][b];
      if (!state.begun) continue;
      CHECK(AllDone(state));
      if (!first) first = &state;
      CHECK_EQ(state.failure, first->failure);
      if (state.failure.empty() || p_.batches[b].variants.size() == 1)
        CHECK(state.groups == first->groups);
    }
  }

  struct RunSeen {
    std::string name;
    int group, batch;
  };
  const Program& p_;
  std::mt19937_64 random_;
  VirtualClock clock_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<std::vector<BatchState>> state_;                // [rank][batch]
  std::vector<std::vector<Started>> started_;                 // [rank][batch]
  std::map<std::tuple<int, int, std::string>, int> current_;  // set, rank, domain: batch
  std::vector<std::vector<std::vector<RunSeen>>> runs_;       // [set][rank]
  std::vector<std::vector<int>> joined_;                      // [set][rank]
  std::vector<std::vector<int>> last_joined_;                 // [set]
  std::map<int, int> joining_;
  std::vector<std::vector<bool>> ended_;  // [set][rank]: AllShutDown
  std::vector<int> epoch_;
  std::vector<bool> join_sent_, shut_;
};

// Throws where a promise is broken.
inline Outcome RunRandomProgram(uint64_t seed, const ProgramOptions& options) {
  const Program program = Maker(seed, options).Make();
  return Runner(seed, program, options).Run();
}

}  // namespace protocol
