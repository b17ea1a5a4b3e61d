#include "comm/schedule.h"

#include <algorithm>
#include <cstring>

namespace gradred::comm {

Stage& Schedule::Next() { return stages.emplace_back(); }

void Schedule::Send(int peer, Slice slice) {
  if (slice.nbytes > 0) stages.back().sends.push_back({peer, slice});
}

void Schedule::Recv(int peer, Slice slice) {
  if (slice.nbytes > 0) stages.back().receives.push_back({peer, slice});
}

void Schedule::Copy(Slice out, Slice a) {
  if (a.nbytes > 0) stages.back().locals.push_back({Local::Kind::kCopy, out, a, {}, 0});
}

void Schedule::Hop(Slice out, Slice a, Slice b, int64_t begin) {
  if (out.nbytes > 0) stages.back().locals.push_back({Local::Kind::kHop, out, a, b, begin});
}

void Schedule::HopAlone(Slice out, int64_t begin) {
  if (out.nbytes > 0) stages.back().locals.push_back({Local::Kind::kHopAlone, out, {}, {}, begin});
}

Slice Schedule::Scratch(int64_t nbytes) {
  const Slice slice{Buffer::kScratch, scratch_nbytes, nbytes};
  scratch_nbytes += reduce::AlignUp(nbytes);
  return slice;
}

namespace {

// Receives are posted up to this many stages ahead, so that a message finds its place when it
// comes.
constexpr size_t kLookAhead = 8;

class ScheduleWork : public Work {
 public:
  ScheduleWork(Transport& transport, TagTurn turn, Schedule schedule, ScheduleBuffers buffers)
      : transport_(transport),
        turn_(std::move(turn)),
        schedule_(std::move(schedule)),
        buffers_(std::move(buffers)),
        scratch_(BufferPool::Take(buffers_.pool, schedule_.scratch_nbytes)),
        pending_(schedule_.stages.size()) {}

  // After a failure transfers may still be running, even those that were aborted: the outside
  // library may write to the scratch memory as long as the process lives.
  ~ScheduleWork() override {
    for (auto& stage : pending_) {
      for (WorkPtr& transfer : stage) {
        if (!transfer->Poll() || !transfer->status().ok()) {
          scratch_.BuryIt();
          return;
        }
      }
    }
  }

 private:
  bool Advance() override {
    if (!turn_.HasCome()) return false;
    for (; current_ < schedule_.stages.size(); ++current_) {
      const Stage& stage = schedule_.stages[current_];
      if (!sent_) {
        PostReceives();
        for (const Transfer& t : stage.sends) {
          pending_[current_].push_back(
              transport_.Send(t.peer, turn_.tag, Address(t.slice), t.slice.nbytes));
        }
        sent_ = true;
      }
      if (!TransfersFinished(&pending_[current_])) return false;
      for (const Local& step : stage.locals) RunLocal(step);
      sent_ = false;
    }
    turn_.mine.reset();
    scratch_.GiveBack();
    return true;
  }

  // In the order of stages, because messages of one peer match in the order of the receives. Stops
  // at a stage that receives where an earlier one still reads.
  void PostReceives() {
    const size_t end = std::min(schedule_.stages.size(), current_ + kLookAhead);
    for (; posted_ < end; ++posted_) {
      const auto& receives = schedule_.stages[posted_].receives;
      const bool in_use = std::any_of(receives.begin(), receives.end(), [](const Transfer& t) {
        return t.slice.buffer == Buffer::kData;
      });
      if (in_use && posted_ > current_) return;
      for (const Transfer& t : receives) {
        pending_[posted_].push_back(
            transport_.Recv(t.peer, turn_.tag, Address(t.slice), t.slice.nbytes));
      }
    }
  }

  static bool TransfersFinished(std::vector<WorkPtr>* transfers) {
    size_t kept = 0;
    for (size_t i = 0; i < transfers->size(); ++i) {
      WorkPtr& transfer = (*transfers)[i];
      if (!transfer->Poll()) {
        std::swap((*transfers)[kept++], transfer);
      } else {
        ThrowIfError(transfer->status());
      }
    }
    transfers->resize(kept);
    return kept == 0;
  }

  void RunLocal(const Local& step) {
    const int64_t begin = buffers_.layout_begin + step.begin;
    const reduce::Range range{begin, begin + step.out.nbytes};
    char* out = Address(step.out);
    const auto start = [&](const Slice& slice) { return Address(slice) - begin; };  // of the layout
    switch (step.kind) {
      case Local::Kind::kCopy:
        std::memcpy(out, Address(step.a), step.a.nbytes);
        break;
      case Local::Kind::kHop:
        buffers_.layout->ReduceHop(start(step.out), start(step.a), start(step.b), range);
        break;
      case Local::Kind::kHopAlone:
        buffers_.layout->HopAlone(start(step.out), range);
        break;
    }
  }

  char* Address(const Slice& slice) const {
    switch (slice.buffer) {
      case Buffer::kData:
        return static_cast<char*>(buffers_.data) + slice.offset;
      case Buffer::kIn:
        return const_cast<char*>(static_cast<const char*>(buffers_.in)) + slice.offset;
      case Buffer::kOut:
        return static_cast<char*>(buffers_.out) + slice.offset;
      case Buffer::kScratch:
        return scratch_.data() + slice.offset;
    }
    return nullptr;
  }

  Transport& transport_;
  TagTurn turn_;
  const Schedule schedule_;
  const ScheduleBuffers buffers_;
  BufferPool::Buffer scratch_;
  std::vector<std::vector<WorkPtr>> pending_;  // [stage], unfinished transfers
  size_t current_ = 0;                         // stage
  size_t posted_ = 0;                          // stages whose receives are posted
  bool sent_ = false;                          // the sends of the current stage are posted
};

}  // namespace

WorkPtr RunSchedule(Transport& transport, TagTurn turn, Schedule schedule,
                    ScheduleBuffers buffers) {
  auto work = std::make_unique<ScheduleWork>(transport, std::move(turn), std::move(schedule),
                                             std::move(buffers));
  work->Poll();  // what can go out goes out now
  return work;
}

}  // namespace gradred::comm
