#include <algorithm>
#include <cstring>
#include <utility>

#include "base/timeline.h"
#include "engine/group_run.h"
#include "engine/pack.h"

namespace gradred::engine {
namespace {

using reduce::ConvertCounts;
using reduce::Range;

// Smaller groups that have no slot share one buffer, in which they are reduced in place; larger
// ones stream through the window of the communicator.
constexpr int64_t kBufferNbytes = 64 << 10;

Range Overlap(Range a, int64_t begin, int64_t end) {
  return {std::max(a.begin, begin), std::min(a.end, end)};
}

// The tensors of a group that runs.
class GroupCargo final : public comm::Cargo {
 public:
  // `spec`, `group` and what the submissions point to stay as long as this. `members`: empty on a
  // rank that has joined.
  GroupCargo(const DomainSpec& spec, const GroupPlan& group, std::vector<Submission*> members,
             const comm::Communicator& communicator)
      : spec_(spec),
        group_(group),
        members_(std::move(members)),
        size_(communicator.size()),
        average_residual_(communicator.average_residual()),
        trailer_(group.members.size() + 2) {}

  // These are in place already: Pack leaves their bytes alone.
  void SetPacked(Batch::Packed packed) { packed_ = std::move(packed); }

  void Pack(Range range, void* at) override {
    const timeline::ChunkSpan span(timeline::Work::kPack, range.nbytes());
    char* const base = static_cast<char*>(at) - range.begin;
    for (size_t i = FirstIn(range); i < group_.members.size(); ++i) {
      const MemberPlan& member = group_.members[i];
      if (member.offset >= range.end) break;
      if (!packed_.members.empty() && packed_.members[i]) continue;
      if (const Range part = Overlap(range, member.offset, member.end()); part.nbytes() > 0)
        PackElements(entry(i), member, Present(i) ? members_[i]->input : nullptr,
                     (part.begin - member.offset) / member.element_nbytes(),
                     part.nbytes() / member.element_nbytes(), size_, base + part.begin,
                     &packed_.counts);
      ZeroBehind(member.end(), range, base);
    }
    // Behind all tensors, so the counts are complete.
    const Range part = Overlap(range, group_.trailer_offset, trailer_end());
    if (part.nbytes() <= 0) return;
    for (size_t i = 0; i < group_.members.size(); ++i) trailer_[i] = Present(i);
    trailer_[group_.members.size()] = packed_.counts.non_finite;
    trailer_[group_.members.size() + 1] = packed_.counts.saturated;
    std::memcpy(base + part.begin, TrailerAt(part), static_cast<size_t>(part.nbytes()));
    ZeroBehind(trailer_end(), range, base);
  }

  void Unpack(Range range, const void* at) override {
    const timeline::ChunkSpan span(timeline::Work::kUnpack, range.nbytes());
    const char* const base = static_cast<const char*>(at) - range.begin;
    if (outputs_.empty()) FindOutputs();
    for (size_t i = FirstIn(range); i < group_.members.size(); ++i) {
      const MemberPlan& member = group_.members[i];
      if (member.offset >= range.end) break;
      const Range part = Overlap(range, member.offset, member.end());
      if (part.nbytes() > 0 && outputs_[i])
        UnpackElements(entry(i), member, outputs_[i],
                       (part.begin - member.offset) / member.element_nbytes(),
                       part.nbytes() / member.element_nbytes(), size_, average_residual_,
                       base + part.begin, &unpacked_);
    }
    if (const Range part = Overlap(range, group_.trailer_offset, trailer_end()); part.nbytes() > 0)
      std::memcpy(TrailerAt(part), base + part.begin, static_cast<size_t>(part.nbytes()));
  }

  // After the last Unpack.
  int present(size_t i) const { return static_cast<int>(trailer_[i]); }
  int64_t non_finite() const { return trailer_[group_.members.size()]; }
  int64_t saturated() const {
    const int64_t in_casts = trailer_[group_.members.size() + 1];
    // Where all values were finite when packed, what is not finite now overflowed in the sum. The
    // reduced values are the same on all ranks, so this count is too.
    return in_casts + (non_finite() + in_casts == 0 ? unpacked_.non_finite : 0);
  }

 private:
  const EntrySpec& entry(size_t i) const { return spec_.entries[group_.first + i]; }
  bool Present(size_t i) const { return !members_.empty() && !members_[i]->absent; }
  int64_t trailer_end() const {
    return group_.trailer_offset + static_cast<int64_t>(trailer_.size() * sizeof(int64_t));
  }
  char* TrailerAt(Range part) {
    return reinterpret_cast<char*>(trailer_.data()) + (part.begin - group_.trailer_offset);
  }

  // The first member with bytes in the range, or with the gap behind it.
  size_t FirstIn(Range range) const {
    const auto at = std::partition_point(
        group_.members.begin(), group_.members.end(),
        [&](const MemberPlan& m) { return reduce::AlignUp(m.end()) <= range.begin; });
    return static_cast<size_t>(at - group_.members.begin());
  }

  static void ZeroBehind(int64_t end, Range range, char* base) {
    if (const Range gap = Overlap(range, end, reduce::AlignUp(end)); gap.nbytes() > 0)
      std::memset(base + gap.begin, 0, static_cast<size_t>(gap.nbytes()));
  }

  void FindOutputs() {
    outputs_.assign(group_.members.size(), nullptr);
    for (size_t i = 0; i < members_.size(); ++i) {
      outputs_[i] = members_[i]->output;
      if (!outputs_[i] && members_[i]->allocate)
        outputs_[i] = members_[i]->allocate(entry(i).shape);
    }
  }

  const DomainSpec& spec_;
  const GroupPlan& group_;
  const std::vector<Submission*> members_;
  const int size_;
  const double average_residual_;
  Batch::Packed packed_;
  ConvertCounts unpacked_;        // of half wires
  std::vector<void*> outputs_;    // by member; null: nobody wants it
  std::vector<int64_t> trailer_;  // see GroupPlan
};

class ReduceRun final : public GroupRun {
 public:
  ReduceRun(RunItem item, SetData* set, MetricsStore* metrics)
      : item_(std::move(item)),
        set_(set),
        metrics_(metrics),
        plan_(item_.batch ? item_.batch->plan_ptr() : PlanOf(*item_.spec)),
        group_(plan_->groups[item_.group]),
        cargo_(std::make_shared<GroupCargo>(
            *item_.spec, group_,
            item_.batch ? item_.batch->Take(item_.group) : std::vector<Submission*>(),
            *set_->communicator)) {
    nbytes = group_.layout->nbytes();
    Start();
  }

  bool started_works() const override { return work_ != nullptr; }

  bool Poll() override {
    if (!work_ && !Start()) return false;
    if (!work_->Poll()) return false;
    ThrowIfError(work_->status());
    if (segment_) cargo_->Unpack({0, nbytes}, data_);
    if (slot_) slot_->Leave();  // first: the next batch may start in a callback of this one
    if (in_buffer_) set_->buffer_taken = false;
    Finish();
    return true;
  }

 private:
  // False: the memory to run on is yet to come.
  bool Start() {
    comm::Communicator& communicator = *set_->communicator;
    has_run_ =
        has_run_ || set_->slots->OnRun(item_.spec->name, *plan_, item_.group, communicator, &slot_);
    if (!has_run_) return false;
    int64_t offset = 0;
    if (slot_) {
      segment_ = slot_->range().segment;
      offset = slot_->range().offset;
      if (slot_->Enter(item_.batch.get()) && item_.batch) {
        Batch::Packed packed = item_.batch->TakePacked(item_.group);
        packed_early_ = std::count(packed.members.begin(), packed.members.end(), true);
        cargo_->SetPacked(std::move(packed));
      }
    } else if (nbytes <= kBufferNbytes) {
      if (set_->buffer_taken) return false;
      in_buffer_ = set_->buffer_taken = true;
      segment_ = &set_->buffer.Reserve(communicator, nbytes);
    }
    if (segment_) {
      data_ = static_cast<char*>(segment_->data()) + offset;
      cargo_->Pack({0, nbytes}, data_);
      work_ = communicator.AllReduce(*segment_, offset, group_.layout);
    } else {
      work_ = communicator.AllReduceCargo(group_.layout, cargo_);
    }
    return true;
  }

  void Finish() {
    const size_t n = group_.members.size();
    std::vector<Result> results(n);
    int64_t bytes = 0, partly = 0;
    for (size_t i = 0; i < n; ++i) {
      const EntrySpec& entry = item_.spec->entries[group_.first + i];
      results[i].present = cargo_->present(i);
      results[i].shape = entry.shape;
      partly += results[i].present > 0 && results[i].present < set_->communicator->size();
      bytes += entry.count() * DTypeSize(entry.dtype);
    }
    const int64_t held =
        set_->buffer.nbytes() + set_->slots->nbytes() + set_->communicator->window_nbytes();
    metrics_->Update([&](Metrics& m) {
      ++m.groups;
      m.entries += item_.batch ? static_cast<int64_t>(n) : 0;
      m.bytes += bytes;
      m.partly_absent += partly;
      m.non_finite += cargo_->non_finite();
      m.saturated += cargo_->saturated();
      m.packed_early += packed_early_;
      m.fusion_buffer_nbytes += held - set_->counted_nbytes;
    });
    set_->counted_nbytes = held;
    if (item_.batch) item_.batch->Finish(item_.group, std::move(results));
  }

  RunItem item_;
  SetData* set_;
  MetricsStore* metrics_;
  std::shared_ptr<const Plan> plan_;
  const GroupPlan& group_;
  const std::shared_ptr<GroupCargo> cargo_;
  bool has_run_ = false;  // as the slots count; alike on all ranks
  SlotPtr slot_;
  bool in_buffer_ = false;
  comm::Segment* segment_ = nullptr;  // null: the communicator asks the cargo
  char* data_ = nullptr;              // in the segment
  int64_t packed_early_ = 0;
  comm::WorkPtr work_;
};

}  // namespace

std::unique_ptr<GroupRun> StartReduceRun(RunItem item, SetData* set, MetricsStore* metrics) {
  return std::make_unique<ReduceRun>(std::move(item), set, metrics);
}

}  // namespace gradred::engine
