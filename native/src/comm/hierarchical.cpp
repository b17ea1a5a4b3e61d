#include "comm/hierarchical.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "base/status.h"

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
// Only polling is out of order. No rank waits in a circle: take the unfinished work that comes
// first by job, chunk and phase. All before it have finished on all ranks, and it waits for nothing
// else: at most for later scatters of the window to start, which need only earlier gathers to have
// started. So all its ranks can start it, and it finishes.

int CeilLog2(int n) {
  int k = 0;
  while ((int64_t{1} << k) < n) ++k;
  return k;
}

// The sections of `layout` within `range`, moved to start at 0. Null when there are none: alike on
// all nodes.
LayoutPtr Cut(const Layout& layout, Range range) {
  std::vector<reduce::Section> sections;
  for (reduce::Section s : layout.sections()) {
    const int64_t size = DTypeSize(s.dtype);
    const int64_t begin = std::max(s.offset, range.begin);
    const int64_t end = std::min(s.offset + s.count * size, range.end);
    if (begin >= end) continue;
    s.offset = begin - range.begin;
    s.count = (end - begin) / size;
    sections.push_back(s);
  }
  return sections.empty() ? nullptr : std::make_shared<const Layout>(std::move(sections));
}

// What the jobs of one hierarchical communicator share.
struct Parts {
  Topology topology;
  std::unique_ptr<Communicator> intra, inter;
  int owners = 1;            // local ranks that reduce between nodes
  int missing_halvings = 0;  // of averages, where this node is smaller than the largest
  HierarchicalOptions options;
};

class Job {
 public:
  Job(Parts& parts, Segment& segment, int64_t offset, LayoutPtr layout)
      : parts_(parts), segment_(segment), offset_(offset), layout_(std::move(layout)) {
    const int64_t chunk = std::max(reduce::AlignUp(parts.options.chunk_nbytes), reduce::kAlign);
    for (int64_t begin = 0; begin < layout_->nbytes(); begin += chunk)
      chunks_.push_back({{begin, std::min(begin + chunk, layout_->nbytes())}, {}, nullptr});
  }

  bool AllStarted() const { return gathers_ == chunks_.size(); }
  bool Finished() const { return finished_ == chunks_.size(); }

  // Starts what is due and finishes what it can. Throws what a work failed with.
  void Advance() {
    while (Step()) {
    }
  }

 private:
  struct Chunk {
    Range range;
    std::vector<Range> ranges;  // of the local ranks
    WorkPtr work;               // of the phase it is in
    enum {
      kWaiting,
      kScattering,
      kScattered,
      kReducing,
      kReduced,
      kGathering,
      kDone
    } phase = kWaiting;
  };

  bool Step() {
    bool moved = false;
    for (size_t i = finished_; i < scatters_; ++i) moved |= Poll(chunks_[i]);
    while (finished_ < gathers_ && chunks_[finished_].phase == Chunk::kDone) ++finished_;
    if (reductions_ < scatters_ && chunks_[reductions_].phase == Chunk::kScattered) {
      StartReduction(chunks_[reductions_++]);
      moved = true;
    }
    // See Note [Order of works in hierarchical].
    const size_t window = static_cast<size_t>(std::max(parts_.options.chunks_in_flight, 1));
    if (scatters_ < std::min(chunks_.size(), gathers_ + window)) {
      StartScatter(chunks_[scatters_++]);
      moved = true;
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
    chunk.phase = chunk.phase == Chunk::kScattering ? Chunk::kScattered
                  : chunk.phase == Chunk::kReducing ? Chunk::kReduced
                                                    : Chunk::kDone;
    return true;
  }

  void StartScatter(Chunk& chunk) {
    chunk.ranges = reduce::Split(chunk.range.nbytes(), parts_.owners);
    for (Range& r : chunk.ranges) r = {r.begin + chunk.range.begin, r.end + chunk.range.begin};
    chunk.ranges.resize(static_cast<size_t>(parts_.topology.local_size),
                        {chunk.range.end, chunk.range.end});
    chunk.work = parts_.intra->ReduceScatter(segment_, offset_, layout_, chunk.ranges);
    chunk.phase = Chunk::kScattering;
  }

  void StartReduction(Chunk& chunk) {
    const Range mine = chunk.ranges[static_cast<size_t>(parts_.topology.local_rank)];
    for (int i = 0; i < parts_.missing_halvings; ++i)
      layout_->HopAlone(static_cast<char*>(segment_.data()) + offset_, mine);
    const LayoutPtr layout = parts_.inter ? Cut(*layout_, mine) : nullptr;
    if (layout) chunk.work = parts_.inter->AllReduce(segment_, offset_ + mine.begin, layout);
    chunk.phase = layout ? Chunk::kReducing : Chunk::kReduced;
  }

  void StartGather(Chunk& chunk) {
    chunk.work = parts_.intra->AllGather(segment_, offset_, chunk.ranges);
    chunk.phase = Chunk::kGathering;
  }

  Parts& parts_;
  Segment& segment_;
  const int64_t offset_;
  const LayoutPtr layout_;
  std::vector<Chunk> chunks_;
  size_t scatters_ = 0, reductions_ = 0, gathers_ = 0;  // started
  size_t finished_ = 0;
};

// The jobs in the order of their calls. A job starts works only when all before it have started
// theirs.
class Queue {
 public:
  explicit Queue(Parts parts) : parts(std::move(parts)) {}

  void Add(std::shared_ptr<Job> job) { jobs_.push_back(std::move(job)); }

  // Whichever job is polled, all move: the one polled may be waiting for another's turn.
  void Advance() {
    ThrowIfError(failure_);
    try {
      for (const auto& job : jobs_) {
        job->Advance();
        if (!job->AllStarted()) break;
      }
    } catch (...) {
      // The order of works is broken from here on: nothing later can succeed.
      failure_ = CurrentException();
      throw;
    }
    while (!jobs_.empty() && jobs_.front()->Finished()) jobs_.pop_front();
  }

  Parts parts;

 private:
  std::deque<std::shared_ptr<Job>> jobs_;
  Status failure_;
};

class JobWork : public Work {
 public:
  JobWork(std::shared_ptr<Queue> queue, std::shared_ptr<Job> job)
      : queue_(std::move(queue)), job_(std::move(job)) {}

 private:
  bool Advance() override {
    // A job that finished while another was polled stays finished, whatever became of the others.
    if (!job_->Finished()) queue_->Advance();
    return job_->Finished();
  }

  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Job> job_;
};

class Hierarchical : public Communicator {
 public:
  Hierarchical(Parts parts, std::unique_ptr<Communicator> flat)
      : flat_(std::move(flat)), queue_(std::make_shared<Queue>(std::move(parts))) {
    const Topology& t = queue_->parts.topology;
    const int largest = LargestNode(t);
    residual_ = std::ldexp(1.0, CeilLog2(largest) + CeilLog2(t.nodes())) / t.size;
  }

  static int LargestNode(const Topology& t) { return NodeSizes(t).back(); }
  static int SmallestNode(const Topology& t) { return NodeSizes(t).front(); }

  int rank() const override { return queue_->parts.topology.rank; }
  int size() const override { return queue_->parts.topology.size; }
  std::string name() const override {
    const Parts& p = queue_->parts;
    std::string text = "hierarchical: " + p.intra->name() + " in the node";
    if (p.inter)
      text += ", " + p.inter->name() + " between " + std::to_string(p.topology.nodes()) + " nodes";
    return text;
  }
  Transport& transport() override { return flat_->transport(); }
  SegmentPtr Alloc(int64_t nbytes) override { return queue_->parts.intra->Alloc(nbytes); }
  double average_residual() const override { return residual_; }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    const auto job = std::make_shared<Job>(queue_->parts, segment, offset, std::move(layout));
    queue_->Add(job);
    return std::make_unique<JobWork>(queue_, job);
  }
  // The parts are not those of the nodes, so all is reduced: the same bits as AllReduce, at its
  // price.
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<Range> parts) override {
    if (static_cast<int>(parts.size()) != size())
      throw Error(Kind::kInternal, "reduce_scatter: expected " + std::to_string(size()) +
                                       " parts, got " + std::to_string(parts.size()));
    return AllReduce(segment, offset, std::move(layout));
  }
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<Range> parts) override {
    return flat_->AllGather(segment, offset, std::move(parts));
  }

  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    return flat_->AllGatherV(mine, all, std::move(nbytes));
  }
  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return flat_->Broadcast(data, nbytes, root);
  }
  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    return flat_->AllToAllV(in, std::move(send), out, std::move(recv));
  }
  WorkPtr Barrier() override { return flat_->Barrier(); }
  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    return flat_->Union(blob, std::move(merge));
  }

 private:
  static std::vector<int> NodeSizes(const Topology& t) {
    std::vector<int> sizes(static_cast<size_t>(t.nodes()), 0);
    for (int node : t.node_of) ++sizes[static_cast<size_t>(node)];
    std::sort(sizes.begin(), sizes.end());
    return sizes;
  }

  std::unique_ptr<Communicator> flat_;
  std::shared_ptr<Queue> queue_;
  double residual_ = 1;
};

void Expect(bool ok, const Topology& t, const std::string& what) {
  if (!ok)
    throw Error(Kind::kInternal, "rank " + std::to_string(t.rank) + ": hierarchical of " +
                                     std::to_string(t.size) + " ranks on " +
                                     std::to_string(t.nodes()) + " nodes: expected " + what);
}

// Exponent k of the 2^-k by which averages of halves are scaled in `c`, which its residual tells.
int Halvings(Communicator& c, const Topology& t, const char* which) {
  const double power = c.average_residual() * c.size();
  const int k = static_cast<int>(std::lround(std::log2(power)));
  Expect(std::abs(std::ldexp(1.0, k) / power - 1) < 1e-9 && k >= 0, t,
         std::string(which) + " communicator that scales averages of halves by a power of two");
  return k;
}

}  // namespace

std::unique_ptr<Communicator> MakeHierarchical(const Topology& t,
                                               std::unique_ptr<Communicator> intra,
                                               std::unique_ptr<Communicator> inter,
                                               std::unique_ptr<Communicator> flat,
                                               const HierarchicalOptions& options) {
  Parts parts;
  parts.owners = Hierarchical::SmallestNode(t);
  Expect(flat && flat->size() == t.size && flat->rank() == t.rank, t,
         "a flat communicator of all ranks");
  Expect(intra && intra->size() == t.local_size && intra->rank() == t.local_rank, t,
         "an intra communicator of the node's " + std::to_string(t.local_size) + " ranks");
  const bool owner = t.local_rank < parts.owners && t.nodes() > 1;
  Expect(owner == (inter != nullptr) || (t.nodes() == 1 && inter), t,
         "an inter communicator on the first " + std::to_string(parts.owners) +
             " ranks of a node and none on others");
  const int scaled = Halvings(*intra, t, "an intra");
  parts.missing_halvings = CeilLog2(Hierarchical::LargestNode(t)) - scaled;
  Expect(parts.missing_halvings >= 0, t,
         "an intra communicator that scales averages of halves by no less than 2^-" +
             std::to_string(scaled + parts.missing_halvings));
  if (inter) {
    Expect(inter->size() == t.nodes() && inter->rank() == t.node_of[static_cast<size_t>(t.rank)], t,
           "an inter communicator with one rank a node, in the nodes' order");
    Expect(Halvings(*inter, t, "an inter") == CeilLog2(t.nodes()), t,
           "an inter communicator that scales averages of halves by 2^-ceil(log2(nodes))");
  }
  parts.topology = t;
  parts.intra = std::move(intra);
  parts.inter = std::move(inter);
  parts.options = options;
  return std::make_unique<Hierarchical>(std::move(parts), std::move(flat));
}

}  // namespace gradred::comm
