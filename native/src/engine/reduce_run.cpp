#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/group_run.h"
#include "reduce/convert.h"

namespace gradred::engine {
namespace {

using reduce::ConvertCounts;
using reduce::ReduceOp;
using Form = MemberPlan::Form;

// What a rank without a tensor contributes: zero, or for min, max and product the value that
// changes nothing.
template <class T>
void FillWith(void* data, int64_t count, T value) {
  T* at = static_cast<T*>(data);
  std::fill(at, at + count, value);
}

template <class T>
void FillLimits(void* data, int64_t count, ReduceOp op) {
  FillWith<T>(
      data, count,
      op == ReduceOp::kMin ? std::numeric_limits<T>::max() : std::numeric_limits<T>::lowest());
}

void FillNeutral(void* data, DType dtype, int64_t count, ReduceOp op) {
  if (op == ReduceOp::kProduct) {
    switch (dtype) {
      case DType::kBool:
      case DType::kUint8:
      case DType::kInt8:
        return FillWith<uint8_t>(data, count, 1);
      case DType::kInt16:
        return FillWith<int16_t>(data, count, 1);
      case DType::kInt32:
        return FillWith<int32_t>(data, count, 1);
      case DType::kInt64:
        return FillWith<int64_t>(data, count, 1);
      case DType::kFloat16:
        return FillWith<uint16_t>(data, count, 0x3c00);
      case DType::kBfloat16:
        return FillWith<uint16_t>(data, count, 0x3f80);
      case DType::kFloat32:
        return FillWith<float>(data, count, 1);
      case DType::kFloat64:
        return FillWith<double>(data, count, 1);
    }
  }
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    const bool min = op == ReduceOp::kMin;
    switch (dtype) {
      case DType::kBool:
        return FillWith<uint8_t>(data, count, min ? 1 : 0);
      case DType::kUint8:
        return FillLimits<uint8_t>(data, count, op);
      case DType::kInt8:
        return FillLimits<int8_t>(data, count, op);
      case DType::kInt16:
        return FillLimits<int16_t>(data, count, op);
      case DType::kInt32:
        return FillLimits<int32_t>(data, count, op);
      case DType::kInt64:
        return FillLimits<int64_t>(data, count, op);
      case DType::kFloat16:
        return FillWith<uint16_t>(data, count, min ? 0x7c00 : 0xfc00);
      case DType::kBfloat16:
        return FillWith<uint16_t>(data, count, min ? 0x7f80 : 0xff80);
      case DType::kFloat32:
        return FillWith<float>(data, count,
                               (min ? 1 : -1) * std::numeric_limits<float>::infinity());
      case DType::kFloat64:
        return FillWith<double>(data, count,
                                (min ? 1 : -1) * std::numeric_limits<double>::infinity());
    }
  }
  std::memset(data, 0, count * DTypeSize(dtype));
}

class ReduceRun final : public GroupRun {
 public:
  ReduceRun(RunItem item, SetData* set, MetricsStore* metrics)
      : item_(std::move(item)),
        set_(set),
        metrics_(metrics),
        plan_(PlanOf(*item_.spec)),
        group_(plan_->groups[item_.group]) {
    if (item_.batch) members_ = item_.batch->Take(item_.group);
    nbytes = group_.layout->nbytes();
    comm::Segment& segment = set_->buffer.Reserve(*set_->communicator, nbytes);
    base_ = static_cast<char*>(segment.data());
    Pack();
    work_ = set_->communicator->AllReduce(segment, 0, group_.layout);
  }

  bool Poll() override {
    if (!work_->Poll()) return false;
    ThrowIfError(work_->status());
    Unpack();
    return true;
  }

 private:
  const EntrySpec& entry(size_t i) const { return item_.spec->entries[group_.first + i]; }
  int64_t* trailer() const { return reinterpret_cast<int64_t*>(base_ + group_.trailer_offset); }

  void Pack() {
    ConvertCounts counts;
    for (size_t i = 0; i < group_.members.size(); ++i) {
      const bool present = !members_.empty() && !members_[i]->absent;
      trailer()[i] = present;
      PackMember(entry(i), group_.members[i], present ? members_[i]->input : nullptr, &counts);
    }
    trailer()[group_.members.size()] = counts.non_finite;
    trailer()[group_.members.size() + 1] = counts.saturated;
  }

  void PackMember(const EntrySpec& entry, const MemberPlan& member, const void* input,
                  ConvertCounts* counts) {
    void* at = base_ + member.offset;
    const int64_t wire_count = member.form == Form::kInt64Average ? 2 * member.count : member.count;
    if (!input) {
      FillNeutral(at, member.wire, wire_count,
                  member.form == Form::kPlain ? entry.reduce_op : ReduceOp::kSum);
    } else if (member.form == Form::kInt64Average) {
      reduce::PackInt64Average(static_cast<int64_t*>(at), static_cast<const int64_t*>(input),
                               member.count, set_->communicator->size());
    } else {
      reduce::Convert(at, member.wire, input, entry.dtype, member.count, entry.prescale, counts);
    }
  }

  void Unpack() {
    const size_t n = group_.members.size();
    std::vector<Result> results(n);
    int64_t bytes = 0, partly = 0;
    for (size_t i = 0; i < n; ++i) {
      results[i].present = static_cast<int>(trailer()[i]);
      partly += results[i].present > 0 && results[i].present < set_->communicator->size();
      bytes += entry(i).count() * DTypeSize(entry(i).dtype);
      if (members_.empty()) continue;
      results[i].shape = entry(i).shape;
      void* output = members_[i]->output;
      if (!output && members_[i]->allocate) output = members_[i]->allocate(entry(i).shape);
      if (output && group_.members[i].count > 0) UnpackMember(entry(i), group_.members[i], output);
    }
    const int64_t non_finite = trailer()[n];
    // Where all values were finite when packed, what is not finite now overflowed in the sum. The
    // reduced values are the same on all ranks, so this count is too.
    const int64_t in_sum = non_finite + trailer()[n + 1] == 0 ? unpacked_.non_finite : 0;
    const int64_t saturated = trailer()[n + 1] + in_sum;
    const bool mine = item_.batch != nullptr;
    metrics_->Update([&](Metrics& m) {
      ++m.groups;
      m.entries += mine ? static_cast<int64_t>(n) : 0;
      m.bytes += bytes;
      m.partly_absent += partly;
      m.non_finite += non_finite;
      m.saturated += saturated;
      m.fusion_buffer_nbytes += set_->buffer.nbytes() - set_->counted_nbytes;
    });
    set_->counted_nbytes = set_->buffer.nbytes();
    if (item_.batch) item_.batch->Finish(item_.group, std::move(results));
  }

  void UnpackMember(const EntrySpec& entry, const MemberPlan& member, void* output) {
    const void* at = base_ + member.offset;
    const int size = set_->communicator->size();
    if (member.form == Form::kInt64Average) {
      reduce::UnpackInt64Average(static_cast<int64_t*>(output), static_cast<const int64_t*>(at),
                                 member.count, size);
    } else if (member.form == Form::kIntegerAverage) {
      reduce::UnpackIntegerAverage(output, entry.dtype, static_cast<const int64_t*>(at),
                                   member.count, size);
    } else {
      double scale = entry.postscale;
      if (entry.reduce_op == ReduceOp::kAverage)
        scale *= IsHalf(member.wire) ? set_->communicator->average_residual() : 1.0 / size;
      reduce::Convert(output, entry.dtype, at, member.wire, member.count, scale,
                      IsHalf(member.wire) ? &unpacked_ : nullptr);
      return;
    }
    if (entry.postscale != 1.0)
      reduce::Convert(output, entry.dtype, output, entry.dtype, member.count, entry.postscale,
                      nullptr);
  }

  RunItem item_;
  SetData* set_;
  MetricsStore* metrics_;
  std::shared_ptr<const Plan> plan_;
  const GroupPlan& group_;
  std::vector<Submission*> members_;  // empty: joined
  char* base_ = nullptr;
  ConvertCounts unpacked_;  // of half wires
  comm::WorkPtr work_;
};

}  // namespace

std::unique_ptr<GroupRun> StartReduceRun(RunItem item, SetData* set, MetricsStore* metrics) {
  return std::make_unique<ReduceRun>(std::move(item), set, metrics);
}

}  // namespace gradred::engine
