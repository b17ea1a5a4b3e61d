#include "comm/streamed.h"

#include <algorithm>
#include <utility>

namespace gradred::comm {
namespace {

// Packed and unpacked by one Poll, so that other works advance.
constexpr int64_t kPollNbytes = 1 << 20;

class StreamWork final : public Work {
 public:
  explicit StreamWork(StreamParts parts)
      : p_(std::move(parts)),
        lanes_(p_.turns.size()),
        chunks_((p_.layout->nbytes() + p_.chunk_nbytes - 1) / p_.chunk_nbytes) {}

  ~StreamWork() override {
    for (Lane& lane : lanes_)  // unfinished: see Work
      if (lane.work != nullptr) lane.buffer.BuryIt();
  }

 private:
  struct Lane {
    BufferPool::Buffer buffer;
    WorkPtr work;
  };

  Lane& LaneOf(int64_t chunk) { return lanes_[static_cast<size_t>(chunk) % lanes_.size()]; }
  reduce::Range RangeOf(int64_t chunk) const {
    const int64_t begin = chunk * p_.chunk_nbytes;
    return {begin, std::min(begin + p_.chunk_nbytes, p_.layout->nbytes())};
  }

  bool Advance() override {
    int64_t left = kPollNbytes;
    // All, not only the first: each moves its own messages on.
    for (int64_t c = unpacked_; c < started_; ++c) LaneOf(c).work->Poll();
    for (bool moved = true; moved;) {
      moved = false;
      if (unpacked_ < started_ && left > 0 && LaneOf(unpacked_).work->Poll()) {
        left -= Finish(unpacked_++);
        moved = true;
      }
      const bool room = started_ - unpacked_ < static_cast<int64_t>(lanes_.size());
      if (started_ < chunks_ && room && left > 0) {
        left -= Start(started_++);
        moved = true;
      }
    }
    if (unpacked_ == chunks_) {
      p_.turns.clear();
      return true;
    }
    if (left <= 0) p_.transport->bell().Ring();  // there is more to do: the owner must not sleep
    return false;
  }

  // Both return the bytes that were touched.
  int64_t Start(int64_t chunk) {
    const reduce::Range range = RangeOf(chunk);
    Lane& lane = LaneOf(chunk);
    char* at = p_.data + range.begin;
    if (p_.cargo != nullptr) {
      if (lane.buffer.data() == nullptr)
        lane.buffer = BufferPool::Take(p_.pool, std::min(p_.chunk_nbytes, p_.layout->nbytes()));
      at = lane.buffer.data();
      p_.cargo->Pack(range, at);
    }
    const TagTurn& turn = p_.turns[static_cast<size_t>(chunk) % lanes_.size()];
    lane.work = p_.reduce(turn, range, at);
    return p_.cargo == nullptr ? 0 : range.nbytes();
  }

  int64_t Finish(int64_t chunk) {
    Lane& lane = LaneOf(chunk);
    ThrowIfError(lane.work->status());
    lane.work.reset();
    if (p_.cargo == nullptr) return 0;
    const reduce::Range range = RangeOf(chunk);
    p_.cargo->Unpack(range, lane.buffer.data());
    if (chunk + static_cast<int64_t>(lanes_.size()) >= chunks_) lane.buffer.GiveBack();
    return range.nbytes();
  }

  StreamParts p_;
  std::vector<Lane> lanes_;  // see Note [Chunks under way]
  const int64_t chunks_;
  int64_t started_ = 0, unpacked_ = 0;
};

}  // namespace

WorkPtr StreamReduction(StreamParts parts) {
  auto work = std::make_unique<StreamWork>(std::move(parts));
  work->Poll();  // what can go out goes out now
  return work;
}

}  // namespace gradred::comm
