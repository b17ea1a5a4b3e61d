#include "comm/node_first.h"

#include <algorithm>
#include <deque>
#include <string>
#include <utility>

namespace gradred::comm {
namespace {

struct Groups {
  std::unique_ptr<Communicator> intra, leaders, flat;
};

class Call {
 public:
  Call(Groups& groups, Segment& segment, int64_t offset, LayoutPtr layout)
      : groups_(groups), segment_(segment), offset_(offset), layout_(std::move(layout)) {}

  bool Advance() {
    while (step_ < kSteps) {
      Communicator* communicator = step_ == kAcross ? groups_.leaders.get() : groups_.intra.get();
      if (communicator == nullptr) {
        ++step_;
        continue;
      }
      if (work_ == nullptr) work_ = communicator->AllReduce(segment_, offset_, layout_);
      if (!work_->Poll()) return false;
      ThrowIfError(work_->status());
      work_.reset();
      ++step_;
    }
    return true;
  }
  bool finished() const { return step_ == kSteps; }

 private:
  enum { kInNode, kAcross, kHandOut, kSteps };
  Groups& groups_;
  Segment& segment_;
  const int64_t offset_;
  const LayoutPtr layout_;
  int step_ = kInNode;
  WorkPtr work_;
};
using CallPtr = std::shared_ptr<Call>;

// The order of works must not depend on timing, so one call is under way at a time.
struct Line {
  Groups groups;
  std::deque<CallPtr> calls;
  Status failure;

  void Advance() {
    ThrowIfError(failure);
    try {
      while (!calls.empty() && calls.front()->Advance()) calls.pop_front();
    } catch (...) {
      failure = CurrentException();
      throw;
    }
  }
};

class CallWork final : public Work {
 public:
  CallWork(std::shared_ptr<Line> line, CallPtr call)
      : line_(std::move(line)), call_(std::move(call)) {}

 private:
  bool Advance() override {
    if (!call_->finished()) line_->Advance();
    return call_->finished();
  }
  const std::shared_ptr<Line> line_;
  const CallPtr call_;
};

bool MayComeTwice(const reduce::Layout& layout) {
  const auto& all = layout.sections();
  return std::all_of(all.begin(), all.end(), [](const reduce::Section& s) {
    return s.op == reduce::ReduceOp::kMin || s.op == reduce::ReduceOp::kMax ||
           s.op == reduce::ReduceOp::kBitAnd;
  });
}

class NodeFirst final : public Communicator {
 public:
  explicit NodeFirst(Groups groups)
      : line_(std::make_shared<Line>(Line{std::move(groups), {}, {}})),
        flat_(*line_->groups.flat) {}

  int rank() const override { return flat_.rank(); }
  int size() const override { return flat_.size(); }
  std::string name() const override {
    return line_->groups.intra->name() + " in the node, one rank a node outside";
  }
  Transport& transport() override { return flat_.transport(); }
  SegmentPtr Alloc(int64_t nbytes) override { return line_->groups.intra->Alloc(nbytes); }
  double average_residual() const override { return flat_.average_residual(); }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    if (!MayComeTwice(*layout)) return flat_.AllReduce(segment, offset, std::move(layout));
    const auto call = std::make_shared<Call>(line_->groups, segment, offset, std::move(layout));
    line_->calls.push_back(call);
    auto work = std::make_unique<CallWork>(line_, call);
    work->Poll();  // what can go out goes out now
    return work;
  }
  WorkPtr AllReduceCargo(LayoutPtr layout, CargoPtr cargo) override {
    return flat_.AllReduceCargo(std::move(layout), std::move(cargo));
  }
  int64_t window_nbytes() const override { return flat_.window_nbytes(); }
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<reduce::Range> parts) override {
    return flat_.ReduceScatter(segment, offset, std::move(layout), std::move(parts));
  }
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<reduce::Range> parts) override {
    return flat_.AllGather(segment, offset, std::move(parts));
  }
  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    return flat_.AllGatherV(mine, all, std::move(nbytes));
  }
  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return flat_.Broadcast(data, nbytes, root);
  }
  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    return flat_.AllToAllV(in, std::move(send), out, std::move(recv));
  }
  WorkPtr Barrier() override { return flat_.Barrier(); }
  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    return flat_.Union(blob, std::move(merge));
  }

 private:
  const std::shared_ptr<Line> line_;
  Communicator& flat_;
};

}  // namespace

std::unique_ptr<Communicator> MakeNodeFirst(std::unique_ptr<Communicator> intra,
                                            std::unique_ptr<Communicator> leaders,
                                            std::unique_ptr<Communicator> flat) {
  return std::make_unique<NodeFirst>(Groups{std::move(intra), std::move(leaders), std::move(flat)});
}

}  // namespace gradred::comm
