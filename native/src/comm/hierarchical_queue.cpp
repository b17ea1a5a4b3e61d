#include "comm/hierarchical_queue.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>

#include "base/graveyard.h"
#include "base/timeline.h"

namespace gradred::comm {
namespace {

using reduce::Layout;
using reduce::Range;

// Note [Order of works in hierarchical]
// A communicator's ranks must issue its works in one order, and nothing here may let timing choose.
//
// Between nodes that order is chunk 0, 1, 2, ... of the first job, then those of the next: a
// counter. A reduction starts when the one before has started and its own scatter has finished.
//
// In the node a scatter is due while fewer than `window` chunks lie between it and the next gather;
// else that gather is due: S0 S1 S2 G0 S3 G1 S4 G2 ... for a window of three. Which one is due is a
// function of the counters alone. An unfinished reduction delays the gather that is due and lets
// nothing pass it. A job's first scatter follows the last gather of the job before (started, not
// finished): letting it go first where the job is known early enough would be a matter of timing.
//
// The chunks of a cargo lie in slots, which chunks take in turn. Packing is the first part of a
// scatter and unpacking the last of a gather, both local: a scatter that is due also waits until
// the chunk that had its slot is unpacked here, and nothing passes it meanwhile. There is one slot
// more than chunks in the window, so that the gather of the chunk that had it has started before
// the scatter is due, and has had the time of another scatter to finish.
//
// Only polling is out of order. No rank waits in a circle: take the unfinished work that comes
// first by job, chunk and phase. All before it have finished on all ranks, and it waits for nothing
// else: at most for later scatters of the window to start, which need only earlier gathers to have
// started, and their slots to be unpacked, whose gathers are earlier too. So all its ranks can
// start it, and it finishes.

// The sections of `layout` within `range`, moved to start at 0. Null when there are none: alike on
// all nodes.
LayoutPtr Cut(const Layout& layout, Range range) {
  const auto end_of = [](const reduce::Section& s) {
    return s.offset + s.count * DTypeSize(s.dtype);
  };
  const auto& all = layout.sections();  // in order, without overlap
  auto at = std::partition_point(
      all.begin(), all.end(), [&](const reduce::Section& s) { return end_of(s) <= range.begin; });
  std::vector<reduce::Section> sections;
  for (; at != all.end() && at->offset < range.end; ++at) {
    reduce::Section s = *at;
    const int64_t begin = std::max(s.offset, range.begin);
    const int64_t end = std::min(end_of(s), range.end);
    if (begin >= end) continue;
    s.offset = begin - range.begin;
    s.count = (end - begin) / DTypeSize(s.dtype);
    sections.push_back(s);
  }
  return sections.empty() ? nullptr : std::make_shared<const Layout>(std::move(sections));
}

// Memory for the chunks of cargos.
struct Window {
  Window(Communicator& intra, int64_t slot_nbytes, int slots)
      : slot_nbytes(slot_nbytes),
        busy(static_cast<size_t>(slots)),
        segment(intra.Alloc(slot_nbytes * slots)) {}
  const int64_t slot_nbytes;
  std::vector<bool> busy;  // [slot]: packed, not yet unpacked
  int64_t taken = 0;       // by chunks so far, in their order: the next one's slot
  SegmentPtr segment;
};
using WindowPtr = std::shared_ptr<Window>;

// Packed and unpacked by one poll, so that other works advance.
constexpr int64_t kPollNbytes = 1 << 20;

// One reduction: in place on a segment, or of a cargo through a window.
class Job {
 public:
  Job(HierarchicalParts& parts, Segment& segment, int64_t offset, LayoutPtr layout)
      : parts_(parts), segment_(segment), layout_(std::move(layout)) {
    CutChunks(std::max(reduce::AlignUp(parts.options.chunk_nbytes), reduce::kAlign));
    for (Chunk& chunk : chunks_) {
      chunk.layout = layout_;
      chunk.at = offset;
    }
  }
  Job(HierarchicalParts& parts, WindowPtr window, LayoutPtr layout, CargoPtr cargo)
      : parts_(parts),
        segment_(*window->segment),
        layout_(std::move(layout)),
        window_(std::move(window)),
        cargo_(std::move(cargo)) {
    CutChunks(window_->slot_nbytes);
  }
  ~Job() {
    // Unfinished: see Work on the memory of such.
    if (window_ != nullptr && !Finished()) Bury(window_->segment);
  }

  bool AllStarted() const { return gathers_ == chunks_.size(); }
  bool Finished() const { return finished_ == chunks_.size(); }
  // Packing or unpacking is due, only not in this poll.
  bool has_more() const { return has_more_; }

  // Starts what is due and finishes what it can; packs and unpacks about *left bytes, which it
  // reduces by them. Throws what a work failed with.
  void Advance(int64_t* left) {
    has_more_ = false;
    while (Step(left)) {
    }
  }

 private:
  struct Chunk {
    Range range;                // of the job's layout
    LayoutPtr layout;           // of what is reduced; null: nothing is
    int64_t at = 0;             // where it starts in the segment
    std::vector<Range> ranges;  // of it, by local rank
    timeline::Stage stage;
    WorkPtr work;     // of the phase it is in
    size_t slot = 0;  // of a cargo
    enum {
      kWaiting,
      kScattering,
      kScattered,
      kReducing,
      kReduced,
      kGathering,
      kGathered,
      kDone
    } phase = kWaiting;
  };

  void CutChunks(int64_t nbytes) {
    for (int64_t begin = 0; begin < layout_->nbytes(); begin += nbytes) {
      chunks_.emplace_back();
      chunks_.back().range = {begin, std::min(begin + nbytes, layout_->nbytes())};
    }
  }

  bool Step(int64_t* left) {
    bool moved = false;
    for (size_t i = finished_; i < scatters_; ++i) moved |= Poll(chunks_[i]);
    while (finished_ < gathers_ && chunks_[finished_].phase == Chunk::kGathered) {
      if (!Unpack(chunks_[finished_], left)) break;
      chunks_[finished_++].phase = Chunk::kDone;
      moved = true;
    }
    if (reductions_ < scatters_ && chunks_[reductions_].phase == Chunk::kScattered) {
      StartReduction(chunks_[reductions_++]);
      moved = true;
    }
    // See Note [Order of works in hierarchical].
    const size_t window = static_cast<size_t>(std::max(parts_.options.chunks_in_flight, 1));
    if (scatters_ < std::min(chunks_.size(), gathers_ + window)) {
      if (Pack(chunks_[scatters_], left)) {
        StartScatter(chunks_[scatters_++]);
        moved = true;
      }
    } else if (gathers_ < scatters_ && chunks_[gathers_].phase == Chunk::kReduced) {
      StartGather(chunks_[gathers_++]);
      moved = true;
    }
    return moved;
  }

  bool Poll(Chunk& chunk) {
    if (!chunk.work || !chunk.work->Poll()) return false;
    ThrowIfError(chunk.work->status());
    chunk.work.reset();
    chunk.stage.End();
    chunk.phase = chunk.phase == Chunk::kScattering ? Chunk::kScattered
                  : chunk.phase == Chunk::kReducing ? Chunk::kReduced
                                                    : Chunk::kGathered;
    return true;
  }

  bool Afford(int64_t nbytes, int64_t* left) {
    has_more_ = *left <= 0;
    if (has_more_) return false;
    *left -= nbytes;
    return true;
  }

  char* data() const { return static_cast<char*>(segment_.data()); }

  // False: not now.
  bool Pack(Chunk& chunk, int64_t* left) {
    if (cargo_ == nullptr) return true;
    const auto slot = static_cast<size_t>(window_->taken) % window_->busy.size();
    if (window_->busy[slot] || !Afford(chunk.range.nbytes(), left)) return false;
    window_->busy[slot] = true;
    ++window_->taken;
    chunk.slot = slot;
    chunk.at = static_cast<int64_t>(slot) * window_->slot_nbytes;
    chunk.layout = Cut(*layout_, chunk.range);
    cargo_->Pack(chunk.range, data() + chunk.at);
    return true;
  }

  bool Unpack(const Chunk& chunk, int64_t* left) {
    if (cargo_ == nullptr) return true;
    if (!Afford(chunk.range.nbytes(), left)) return false;
    cargo_->Unpack(chunk.range, data() + chunk.at);
    window_->busy[chunk.slot] = false;
    return true;
  }

  void StartScatter(Chunk& chunk) {
    chunk.phase = chunk.layout ? Chunk::kScattering : Chunk::kScattered;
    if (!chunk.layout) return;
    const Range whole = cargo_ ? Range{0, chunk.layout->nbytes()} : chunk.range;
    chunk.ranges = reduce::Split(whole.nbytes(), parts_.owners);
    for (Range& r : chunk.ranges) r = {r.begin + whole.begin, r.end + whole.begin};
    chunk.ranges.resize(static_cast<size_t>(parts_.topology.local_size), {whole.end, whole.end});
    chunk.stage.Enter("reduce in the node", chunk.range.nbytes());
    chunk.work = parts_.intra->ReduceScatter(segment_, chunk.at, chunk.layout, chunk.ranges);
  }

  void StartReduction(Chunk& chunk) {
    chunk.phase = Chunk::kReduced;
    if (!chunk.layout) return;
    const Range mine = chunk.ranges[static_cast<size_t>(parts_.topology.local_rank)];
    for (int i = 0; i < parts_.missing_halvings; ++i)
      chunk.layout->HopAlone(data() + chunk.at, mine);
    const LayoutPtr layout = parts_.inter ? Cut(*chunk.layout, mine) : nullptr;
    if (!layout) return;
    chunk.stage.Enter("reduce between nodes", mine.nbytes());
    chunk.work = parts_.inter->AllReduce(segment_, chunk.at + mine.begin, layout);
    chunk.phase = Chunk::kReducing;
  }

  void StartGather(Chunk& chunk) {
    chunk.phase = chunk.layout ? Chunk::kGathering : Chunk::kGathered;
    if (!chunk.layout) return;
    chunk.stage.Enter("gather in the node", chunk.range.nbytes());
    chunk.work = parts_.intra->AllGather(segment_, chunk.at, chunk.ranges);
  }

  HierarchicalParts& parts_;
  Segment& segment_;
  const LayoutPtr layout_;
  const WindowPtr window_;
  const CargoPtr cargo_;  // null: in place
  std::vector<Chunk> chunks_;
  size_t scatters_ = 0, reductions_ = 0, gathers_ = 0;  // started
  size_t finished_ = 0;
  bool has_more_ = false;
};
using JobPtr = std::shared_ptr<Job>;

// The jobs in the order of their calls. A job starts works only when all before it have started
// theirs.
class Queue final : public HierarchicalQueue, public std::enable_shared_from_this<Queue> {
 public:
  Queue(HierarchicalParts parts, Transport& transport)
      : parts_(std::move(parts)), transport_(transport) {}

  HierarchicalParts& parts() override { return parts_; }

  WorkPtr Start(Segment& segment, int64_t offset, LayoutPtr layout) override {
    return Add(std::make_shared<Job>(parts_, segment, offset, std::move(layout)));
  }
  WorkPtr Start(LayoutPtr layout, CargoPtr cargo) override {
    GrowWindow(layout->nbytes());
    return Add(std::make_shared<Job>(parts_, window_, std::move(layout), std::move(cargo)));
  }
  int64_t window_nbytes() const override {
    return window_ ? window_->slot_nbytes * static_cast<int64_t>(window_->busy.size()) : 0;
  }

  // Whichever job is polled, all move: the one polled may be waiting for another's turn.
  void Advance() {
    ThrowIfError(failure_);
    int64_t left = kPollNbytes;
    bool has_more = false;
    try {
      for (const JobPtr& job : jobs_) {
        job->Advance(&left);
        has_more |= job->has_more();
        if (!job->AllStarted()) break;
      }
    } catch (...) {
      // The order of works is broken from here on: nothing later can succeed.
      failure_ = CurrentException();
      throw;
    }
    while (!jobs_.empty() && jobs_.front()->Finished()) jobs_.pop_front();
    if (has_more) transport_.bell().Ring();  // the owner must not sleep
  }

 private:
  WorkPtr Add(JobPtr job);

  // Small while all cargos were small. Calls come in one order on all ranks, so segments do too. A
  // job keeps the window that it began with.
  void GrowWindow(int64_t nbytes) {
    constexpr int64_t kSmallest = 4096;
    const int64_t largest =
        std::max(reduce::AlignUp(parts_.options.cargo_chunk_nbytes), reduce::kAlign);
    int64_t slot = std::min(kSmallest, largest);
    while (slot < std::min(nbytes, largest)) slot = std::min(2 * slot, largest);
    if (window_ && window_->slot_nbytes >= slot) return;
    window_ = std::make_shared<Window>(*parts_.intra, slot,
                                       std::max(parts_.options.chunks_in_flight, 1) + 1);
  }

  HierarchicalParts parts_;
  Transport& transport_;
  WindowPtr window_;
  std::deque<JobPtr> jobs_;
  Status failure_;
};

class JobWork final : public Work {
 public:
  JobWork(std::shared_ptr<Queue> queue, JobPtr job)
      : queue_(std::move(queue)), job_(std::move(job)) {}

 private:
  bool Advance() override {
    // A job that finished while another was polled stays finished, whatever became of the others.
    if (!job_->Finished()) queue_->Advance();
    return job_->Finished();
  }

  const std::shared_ptr<Queue> queue_;
  const JobPtr job_;
};

WorkPtr Queue::Add(JobPtr job) {
  jobs_.push_back(job);
  return std::make_unique<JobWork>(shared_from_this(), std::move(job));
}

}  // namespace

std::shared_ptr<HierarchicalQueue> MakeHierarchicalQueue(HierarchicalParts parts,
                                                         Transport& transport) {
  return std::make_shared<Queue>(std::move(parts), transport);
}

}  // namespace gradred::comm
