#include "engine/batch_times.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace gradred::engine {
namespace {

Nanos CpuOfProcess() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<Nanos>(t.tv_sec) * kSecond + t.tv_nsec;
}

// The value that `share` of the others are below.
Nanos Quantile(std::vector<Nanos> values, double share) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<ptrdiff_t>(share * (values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

Nanos Median(std::vector<Nanos> values) { return Quantile(std::move(values), 0.5); }

}  // namespace

BatchTimes::BatchTimes(std::shared_ptr<TimesStore> store, FormPtr form, int64_t number)
    : store_(std::move(store)),
      form_(std::move(form)),
      number_(number),
      submitted_(form_->place_of.size(), 0),
      groups_(form_->spec->group_ends.size()),
      groups_left_(static_cast<int>(groups_.size())) {}

void BatchTimes::GroupRan(int group, Nanos start, Nanos end) {
  groups_[group] = {start, end};
  if (--groups_left_ == 0) store_->Add(*this);
}

void TimesStore::Restart(ArrangementPtr arrangement, int warm_up) {
  std::lock_guard<std::mutex> lock(mutex_);
  arrangement_ = std::move(arrangement);
  records_.clear();
  skip_ = warm_up;
}

void TimesStore::Add(const BatchTimes& times) {
  const Nanos cpu = CpuOfProcess();
  std::lock_guard<std::mutex> lock(mutex_);
  const bool follows = times.number_ == last_->number + 1;
  if (times.form_->purpose == Purpose::kProbe) AddProbes(times);
  if (times.form_->purpose == Purpose::kPlain && times.form_->arrangement == arrangement_ &&
      follows && skip_-- <= 0)
    AddRecord(times, cpu);
  last_->number = times.number_;
  last_->cpu = cpu;
  last_->end = 0;
  for (const core::GroupTimes& group : times.groups_) last_->end = std::max(last_->end, group.end);
}

void TimesStore::AddProbes(const BatchTimes& times) {
  probed_.clear();
  std::vector<Nanos> repeats;
  for (int g = 0; g < times.form_->extra; ++g) {
    repeats.push_back(times.groups_[g].end - times.groups_[g].start);
    if (static_cast<int>(repeats.size()) < kProbeRepeats) continue;
    probed_.push_back(*std::min_element(repeats.begin(), repeats.end()));
    repeats.clear();
  }
}

void TimesStore::AddRecord(const BatchTimes& times, Nanos cpu) {
  const Form& form = *times.form_;
  Record record;
  record.cpu = cpu - last_->cpu;
  for (const Nanos submitted : times.submitted_)
    record.ready.push_back(std::max<Nanos>(0, submitted - last_->end));
  // Groups run one at a time, in the order in which they become ready: not always that of the plan.
  std::vector<Nanos> ends{last_->end};
  for (const core::GroupTimes& ran : times.groups_) ends.push_back(ran.end);
  std::sort(ends.begin(), ends.end());
  record.end = ends.back() - last_->end;
  int place = 0;
  for (size_t g = 0; g < form.arrangement->group_ends.size(); ++g) {
    const core::GroupTimes& ran = times.groups_[form.extra + g];
    Nanos ready = 0;
    int64_t nbytes = 0;
    for (; place < form.arrangement->group_ends[g]; ++place) {
      ready = std::max(ready, times.submitted_[form.arrangement->order[place]]);
      nbytes += WireNbytes(form.spec->entries[form.extra + place]);
    }
    const auto after = std::upper_bound(ends.begin(), ends.end(), ran.start);
    const Nanos before = after == ends.begin() ? ends.front() : *(after - 1);
    record.round.push_back(std::max<Nanos>(0, ran.start - std::max(ready, before)));
    record.nbytes.push_back(nbytes);
    record.groups.push_back({ran.start - last_->end, ran.end - last_->end});
  }
  records_.push_back(std::move(record));
  if (records_.size() > most_) records_.pop_front();
}

std::vector<core::GroupTimes> TimesStore::GroupMedians() const {
  std::vector<core::GroupTimes> medians;
  if (records_.empty()) return medians;
  for (size_t g = 0; g < records_.back().groups.size(); ++g) {
    std::vector<Nanos> starts, lengths;
    for (const Record& record : records_) {
      if (g >= record.groups.size()) continue;
      starts.push_back(record.groups[g].start);
      lengths.push_back(record.groups[g].end - record.groups[g].start);
    }
    const Nanos start = Median(std::move(starts));
    medians.push_back({start, start + Median(std::move(lengths))});
  }
  return medians;
}

std::vector<core::GroupTimes> TimesStore::Groups() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return GroupMedians();
}

// Costs times how much longer groups of about that size took than they should have. Between sizes
// that were seen, the factor is linear in log size; beyond them it stays.
std::vector<Nanos> TimesStore::Corrected(const std::vector<int64_t>& sizes,
                                         const std::vector<Nanos>& costs) const {
  std::vector<core::CostTable::Knot> knots;
  for (size_t k = 0; k < sizes.size(); ++k) knots.emplace_back(sizes[k], costs[k]);
  const core::CostTable table(std::move(knots));
  const std::vector<core::GroupTimes> groups = GroupMedians();
  std::vector<std::pair<double, double>> factors;  // by log size
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t nbytes = records_.back().nbytes[g];
    const double expected = static_cast<double>(std::max<Nanos>(1, table.At(nbytes)));
    const double took = static_cast<double>(groups[g].end - groups[g].start);
    factors.emplace_back(std::log2(static_cast<double>(std::max<int64_t>(1, nbytes))),
                         std::clamp(took / expected, 0.125, 8.0));
  }
  if (factors.empty()) return costs;
  std::sort(factors.begin(), factors.end());
  std::vector<Nanos> corrected;
  for (size_t k = 0; k < sizes.size(); ++k) {
    const double x = std::log2(static_cast<double>(sizes[k]));
    double factor = factors.back().second;
    const auto above = std::lower_bound(factors.begin(), factors.end(), std::make_pair(x, 0.0));
    if (above == factors.begin()) {
      factor = factors.front().second;
    } else if (above != factors.end()) {
      const auto& [x0, f0] = *(above - 1);
      const auto& [x1, f1] = *above;
      factor = x1 > x0 ? f0 + (f1 - f0) * (x - x0) / (x1 - x0) : f1;
    }
    corrected.push_back(static_cast<Nanos>(static_cast<double>(costs[k]) * factor));
  }
  return corrected;
}

Measured TimesStore::Read(int entries, const std::vector<int64_t>& probe_sizes,
                          const std::vector<Nanos>& known, double cores) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Measured measured;
  // Where shapes vary, they may hold for another number of sizes.
  const std::vector<Nanos>& costs = known.size() == probe_sizes.size() ? known : probed_;
  measured.unprobed = costs.size() != probe_sizes.size();
  measured.costs = measured.unprobed ? std::vector<Nanos>(probe_sizes.size(), 0) : costs;
  measured.ready.assign(entries, 0);
  measured.lacking = records_.size() < std::max<size_t>(1, most_ * 3 / 4) ||
                     static_cast<int>(records_.back().ready.size()) != entries;
  if (measured.lacking) return measured;
  std::vector<Nanos> values;
  const auto median_of = [&](auto value) {
    values.clear();
    for (const Record& record : records_) values.push_back(value(record));
    return Median(values);
  };
  for (int i = 0; i < entries; ++i)
    measured.ready[i] = median_of([i](const Record& record) { return record.ready[i]; });
  measured.end = median_of([](const Record& record) { return record.end; });
  const Nanos cpu = median_of([](const Record& record) { return record.cpu; });
  measured.busy_permille = static_cast<int64_t>(1000.0 * static_cast<double>(cpu) /
                                                (cores * static_cast<double>(measured.end + 1)));
  std::vector<Nanos> rounds;
  for (const Record& record : records_)
    rounds.insert(rounds.end(), record.round.begin(), record.round.end());
  measured.round = Quantile(std::move(rounds), 0.25);
  if (!measured.unprobed) measured.costs = Corrected(probe_sizes, measured.costs);
  return measured;
}

}  // namespace gradred::engine
