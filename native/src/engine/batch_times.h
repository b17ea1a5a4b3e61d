// When entries were submitted and groups ran, on this rank: recorded batch by batch, kept for the
// last ones.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/planner.h"
#include "engine/form.h"
#include "engine/measured.h"

namespace gradred::engine {

class TimesStore;

// Of one batch. Shared by the caller's threads (Submitted, each position once) and the data loop
// (GroupRan, after the group's entries were submitted).
class BatchTimes {
 public:
  BatchTimes(std::shared_ptr<TimesStore> store, FormPtr form, int64_t number);
  void Submitted(int position) { submitted_[position] = Now(); }
  void GroupRan(int group, Nanos start, Nanos end);

 private:
  friend class TimesStore;
  const std::shared_ptr<TimesStore> store_;
  const FormPtr form_;
  const int64_t number_;
  std::vector<Nanos> submitted_;  // by position in the caller's list
  std::vector<core::GroupTimes> groups_;
  int groups_left_;
};

// The batch of a domain that ran last. Belongs to the data loop.
struct LastBatch {
  int64_t number = -1;
  Nanos end = 0, cpu = 0;
};

// The last batches of one list of a domain. Times count from the end of the batch before.
class TimesStore {
 public:
  TimesStore(int batches, std::shared_ptr<LastBatch> last)
      : most_(batches), last_(std::move(last)) {}

  // Another arrangement is used: only its batches count, and not the first `warm_up` of them.
  void Restart(ArrangementPtr arrangement, int warm_up);
  // All groups of a batch have run.
  void Add(const BatchTimes& times);

  // Medians of the last batches, as this rank's part of an exchange. `known`: the costs that all
  // ranks agreed on before, which what was seen since corrects; empty: none. busy_permille is of
  // `cores`.
  Measured Read(int entries, const std::vector<int64_t>& probe_sizes,
                const std::vector<Nanos>& known, double cores) const;
  // Medians of the groups' times; empty if none was measured.
  std::vector<core::GroupTimes> Groups() const;

 private:
  struct Record {
    std::vector<Nanos> ready;              // by position
    std::vector<core::GroupTimes> groups;  // without the engine's own
    std::vector<int64_t> nbytes;           // of these
    std::vector<Nanos> round;              // by group: from ready here to the start
    Nanos end = 0;                         // of the group that ended last
    Nanos cpu = 0;                         // of this process
  };
  void AddProbes(const BatchTimes& times);
  void AddRecord(const BatchTimes& times, Nanos cpu);
  std::vector<core::GroupTimes> GroupMedians() const;
  std::vector<Nanos> Corrected(const std::vector<int64_t>& sizes,
                               const std::vector<Nanos>& costs) const;

  const size_t most_;
  const std::shared_ptr<LastBatch> last_;
  mutable std::mutex mutex_;
  ArrangementPtr arrangement_;
  std::deque<Record> records_;
  int skip_ = 0;
  std::vector<Nanos> probed_;  // costs by size
};

}  // namespace gradred::engine
