#include "engine/form.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/measured.h"

namespace gradred::engine {
namespace {

constexpr int64_t kSmallestProbe = 4 << 10, kLargestProbe = 16 << 20;

EntrySpec Maxima(const std::string& label, int64_t count) {
  EntrySpec entry;
  entry.label = label;
  entry.reduce_op = reduce::ReduceOp::kMax;
  entry.dtype = entry.wire = DType::kInt64;
  entry.shape = {count};
  return entry;
}

// Of the kind that has most bytes.
EntrySpec ProbeEntry(const DomainSpec& listed, int64_t nbytes) {
  const auto most = std::max_element(
      listed.entries.begin(), listed.entries.end(), [](const EntrySpec& a, const EntrySpec& b) {
        return a.count() * DTypeSize(a.dtype) < b.count() * DTypeSize(b.dtype);
      });
  EntrySpec entry;
  entry.label = "(what " + std::to_string(nbytes) + " bytes cost)";
  entry.dtype = most->dtype;
  entry.wire = most->wire;
  entry.shape = {nbytes / DTypeSize(most->wire)};
  if (entry.dtype == DType::kBool) entry.reduce_op = reduce::ReduceOp::kMax;
  return entry;
}

std::vector<EntrySpec> OwnEntries(const DomainSpec& listed, Purpose purpose) {
  std::vector<EntrySpec> entries;
  switch (purpose) {
    case Purpose::kPlain:
      break;
    case Purpose::kCompare:
      entries.push_back(Maxima("(order of the gradients)", kCompared));
      break;
    case Purpose::kProbe:
      for (const int64_t nbytes : ProbeSizes(listed))
        entries.insert(entries.end(), kProbeRepeats, ProbeEntry(listed, nbytes));
      break;
    case Purpose::kExchange:
      entries.push_back(Maxima("(times of the gradients)",
                               Measured::Count(static_cast<int>(ProbeSizes(listed).size()),
                                               static_cast<int>(listed.entries.size()))));
      break;
  }
  return entries;
}

}  // namespace

int64_t WireNbytes(const EntrySpec& entry) {
  const bool pairs = entry.reduce_op == reduce::ReduceOp::kAverage && IsInteger(entry.dtype);
  return entry.count() * (pairs ? 2 * DTypeSize(DType::kInt64) : DTypeSize(entry.wire));
}

std::vector<int64_t> ProbeSizes(const DomainSpec& listed) {
  int64_t total = 0;
  for (const EntrySpec& entry : listed.entries) total += WireNbytes(entry);
  std::vector<int64_t> sizes{kSmallestProbe, 4 * kSmallestProbe};
  while (sizes.back() < total && sizes.back() < kLargestProbe) sizes.push_back(4 * sizes.back());
  return sizes;
}

FormPtr MakeForm(const DomainSpecPtr& listed, Purpose purpose, const ArrangementPtr& arrangement) {
  auto form = std::make_shared<Form>();
  form->purpose = purpose;
  const int n = static_cast<int>(listed->entries.size());
  form->arrangement = arrangement;
  const std::vector<int>& order = form->arrangement->order;

  auto spec = std::make_shared<DomainSpec>();
  spec->name = listed->name;
  spec->process_set = listed->process_set;
  spec->entries = OwnEntries(*listed, purpose);
  form->extra = static_cast<int>(spec->entries.size());
  spec->group_ends.resize(form->extra);
  std::iota(spec->group_ends.begin(), spec->group_ends.end(), 1);
  for (const int position : order) spec->entries.push_back(listed->entries[position]);
  for (const int end : form->arrangement->group_ends) spec->group_ends.push_back(form->extra + end);
  form->place_of.resize(n);
  for (int place = 0; place < n; ++place) form->place_of[order[place]] = form->extra + place;
  form->spec = std::move(spec);
  return form;
}

}  // namespace gradred::engine
