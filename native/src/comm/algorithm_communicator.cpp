#include "comm/algorithm_communicator.h"

#include <algorithm>
#include <array>

#include "comm/host_segment.h"
#include "comm/patterns.h"
#include "comm/schedule.h"
#include "comm/streamed.h"
#include "comm/tag_turn.h"
#include "comm/union_work.h"

namespace gradred::comm {
namespace {

class AlgorithmCommunicator : public Communicator {
 public:
  AlgorithmCommunicator(Transport& transport, std::vector<int> members, uint16_t channel,
                        const AlgorithmOptions& options)
      : transport_(transport),
        native_(options.native),
        members_(std::move(members)),
        channel_(channel),
        broadcast_chunk_nbytes_(std::max<int64_t>(1, options.broadcast_chunk_nbytes)),
        chunk_nbytes_(std::max(reduce::AlignUp(options.chunk_nbytes), reduce::kAlign)),
        chunks_in_flight_(std::clamp(options.chunks_in_flight, 1, kSequences / 2)) {
    const auto mine = std::find(members_.begin(), members_.end(), transport.rank());
    rank_ = static_cast<int>(mine - members_.begin());
    Require(mine != members_.end(), "a communicator without its own rank", "a member",
            transport.rank());
    Require(channel < kChannels, "channel of a communicator",
            "less than " + std::to_string(kChannels), channel);
    for (const int member : members_) {
      Require(member >= 0 && member < transport.size(), "member of a communicator",
              "less than " + std::to_string(transport.size()), member);
    }
    rows_ = MergeAlgorithms(size(), options.rows);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string name() const override { return "recursive doubling and halving over messages"; }
  Transport& transport() override { return transport_; }
  double average_residual() const override {
    return static_cast<double>(int64_t{1} << HopCount(size())) / size();
  }

  SegmentPtr Alloc(int64_t nbytes) override { return MakeHostSegment(nbytes); }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    const int64_t nbytes = layout->nbytes();
    void* data = At(segment, offset, nbytes, "allreduce");
    if (IsNative(*layout)) return native_->AllReduce(data, *layout);
    if (nbytes > chunk_nbytes_) return Stream(std::move(layout), nullptr, static_cast<char*>(data));
    Schedule schedule = AllReduceSchedule(Choose(rows_, "allreduce", nbytes), nbytes, *layout);
    return Run(std::move(schedule), {data, nullptr, nullptr, std::move(layout)});
  }

  WorkPtr AllReduceCargo(LayoutPtr layout, CargoPtr cargo) override {
    // In one piece: chunks of several works would begin in an order that timing chooses.
    if (IsNative(*layout)) return Communicator::AllReduceCargo(std::move(layout), std::move(cargo));
    return Stream(std::move(layout), std::move(cargo), nullptr);
  }
  int64_t window_nbytes() const override { return pool_->kept_nbytes(); }

  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<reduce::Range> parts) override {
    void* data = At(segment, offset, layout->nbytes(), "reduce_scatter");
    CheckParts(parts, layout->nbytes(), "reduce_scatter");
    return Run(PairwiseReduceScatter(rank_, size(), parts),
               {data, nullptr, nullptr, std::move(layout)});
  }

  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<reduce::Range> parts) override {
    int64_t end = 0;
    for (const reduce::Range& part : parts) end = std::max(end, part.end);
    void* data = At(segment, offset, end, "allgather");
    CheckParts(parts, end, "allgather");
    const Slice mine{Buffer::kOut, parts[rank_].begin, parts[rank_].nbytes()};
    return Run(AllGatherSchedule(parts, mine), {nullptr, nullptr, data, nullptr});
  }

  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    CheckSizes(nbytes, "allgather");
    Ranges blocks;
    int64_t end = 0;
    for (const int64_t n : nbytes) {
      blocks.push_back({end, end + n});
      end += n;
    }
    return Run(AllGatherSchedule(blocks, {Buffer::kIn, 0, nbytes[rank_]}),
               {nullptr, mine, all, nullptr});
  }

  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    Require(root >= 0 && root < size(), "root of a broadcast",
            "0 ... " + std::to_string(size() - 1), root);
    Require(nbytes >= 0, "bytes of a broadcast", "0 or more", nbytes);
    return Run(BinomialBroadcast(rank_, size(), root, nbytes, broadcast_chunk_nbytes_),
               {nullptr, nullptr, data, nullptr});
  }

  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    CheckSizes(send, "alltoall");
    CheckSizes(recv, "alltoall");
    Require(send[rank_] == recv[rank_], "alltoall: bytes from a rank to itself",
            std::to_string(send[rank_]), recv[rank_]);
    return Run(PairwiseAllToAll(rank_, size(), send, recv), {nullptr, in, out, nullptr});
  }

  WorkPtr Barrier() override { return Run(DisseminationBarrier(rank_, size()), {}); }

  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    std::vector<Exchange> steps = RecursiveDoublingUnion(rank_, size());
    for (Exchange& step : steps) {
      if (step.send_to >= 0) step.send_to = members_[step.send_to];
      if (step.receive_from >= 0) step.receive_from = members_[step.receive_from];
    }
    return RunUnion(transport_, NextTurn(), std::move(steps), blob, std::move(merge));
  }

 private:
  WorkPtr Run(Schedule schedule, ScheduleBuffers buffers) {
    return RunWith(NextTurn(), std::move(schedule), std::move(buffers));
  }

  WorkPtr RunWith(TagTurn turn, Schedule schedule, ScheduleBuffers buffers) {
    for (Stage& stage : schedule.stages) {
      for (Transfer& t : stage.sends) t.peer = members_[t.peer];
      for (Transfer& t : stage.receives) t.peer = members_[t.peer];
    }
    buffers.pool = pool_;
    return RunSchedule(transport_, std::move(turn), std::move(schedule), std::move(buffers));
  }

  // The algorithm is the one of the whole size.
  WorkPtr Stream(LayoutPtr layout, CargoPtr cargo, char* data) {
    StreamParts parts;
    const int64_t nbytes = layout->nbytes();
    const int64_t chunks = (nbytes + chunk_nbytes_ - 1) / chunk_nbytes_;
    for (int64_t i = 0; i < std::min<int64_t>(chunks, chunks_in_flight_); ++i)
      parts.turns.push_back(NextTurn());
    const Algorithm algorithm = Choose(rows_, "allreduce", nbytes);
    parts.reduce = [this, layout, algorithm](TagTurn turn, reduce::Range range, char* at) {
      ScheduleBuffers buffers{at, nullptr, nullptr, layout, range.begin};
      return RunWith(std::move(turn), AllReduceSchedule(algorithm, range.nbytes(), *layout),
                     std::move(buffers));
    };
    parts.transport = &transport_;
    parts.layout = std::move(layout);
    parts.chunk_nbytes = chunk_nbytes_;
    parts.cargo = std::move(cargo);
    parts.data = data;
    parts.pool = pool_;
    return StreamReduction(std::move(parts));
  }

  TagTurn NextTurn() {
    const uint16_t sequence = next_sequence_;
    next_sequence_ = static_cast<uint16_t>((sequence + 1) % kSequences);
    TagTurn turn{{channel_, sequence}, turns_[sequence], std::make_shared<char>()};
    turns_[sequence] = turn.mine;
    return turn;
  }

  Schedule AllReduceSchedule(Algorithm algorithm, int64_t nbytes,
                             const reduce::Layout& layout) const {
    switch (algorithm) {
      case Algorithm::kRecursiveDoubling:
        return RecursiveDoublingAllReduce(rank_, size(), nbytes);
      case Algorithm::kRecursiveHalving:
        return RecursiveHalvingAllReduce(rank_, size(), nbytes);
      case Algorithm::kRing:
        if (!HasAverages(layout)) return RingAllReduce(rank_, size(), nbytes);
        [[fallthrough]];  // pairwise sends as many bytes
      default:            // native too, where the library lacks something
        return PairwiseAllReduce(rank_, size(), nbytes);
    }
  }

  bool IsNative(const reduce::Layout& layout) const {
    return native_ != nullptr && native_->Knows(layout) &&
           Choose(rows_, "allreduce", layout.nbytes()) == Algorithm::kNative;
  }

  static bool HasAverages(const reduce::Layout& layout) {
    const auto& sections = layout.sections();
    return std::any_of(sections.begin(), sections.end(),
                       [](const reduce::Section& s) { return s.op == reduce::ReduceOp::kAverage; });
  }

  Schedule AllGatherSchedule(const Ranges& blocks, const Slice& mine) const {
    int64_t total = 0;
    for (const reduce::Range& block : blocks) total += block.nbytes();
    return Choose(rows_, "allgather", total) == Algorithm::kBruck
               ? BruckAllGather(rank_, size(), blocks, mine)
               : PairwiseAllGather(rank_, size(), blocks, mine);
  }

  void* At(Segment& segment, int64_t offset, int64_t nbytes, const char* name) const {
    const std::string what = name;
    const bool aligned = offset >= 0 && offset % reduce::kAlign == 0;
    const bool fits = offset + nbytes <= segment.nbytes();
    if (!aligned || !fits) {  // the texts take as long as a small reduction
      Require(aligned, what + ": offset in the segment",
              "a multiple of " + std::to_string(reduce::kAlign), offset);
      Require(fits, what + ": end in the segment", "at most " + std::to_string(segment.nbytes()),
              offset + nbytes);
    }
    return static_cast<char*>(segment.data()) + offset;
  }

  void CheckParts(const Ranges& parts, int64_t end, const std::string& what) const {
    Require(static_cast<int>(parts.size()) == size(), what + ": parts", std::to_string(size()),
            static_cast<int64_t>(parts.size()));
    for (const reduce::Range& part : parts) {
      Require(part.begin >= 0 && part.begin % reduce::kAlign == 0, what + ": begin of a part",
              "a multiple of " + std::to_string(reduce::kAlign), part.begin);
      Require(part.end >= part.begin && part.end <= end &&
                  (part.end % reduce::kAlign == 0 || part.end == end),
              what + ": end of a part from " + std::to_string(part.begin),
              "a multiple of " + std::to_string(reduce::kAlign) + " up to " + std::to_string(end),
              part.end);
    }
  }

  void CheckSizes(const std::vector<int64_t>& nbytes, const std::string& what) const {
    Require(static_cast<int>(nbytes.size()) == size(), what + ": sizes", std::to_string(size()),
            static_cast<int64_t>(nbytes.size()));
    for (const int64_t n : nbytes) Require(n >= 0, what + ": bytes of a rank", "0 or more", n);
  }

  void Require(bool ok, const std::string& what, const std::string& expected, int64_t got) const {
    if (ok) return;
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(transport_.rank()) + ": " + what +
                                            ": expected " + expected + ", got " +
                                            std::to_string(got));
  }

  Transport& transport_;
  const NativeReducePtr native_;
  const std::vector<int> members_;
  const uint16_t channel_;
  const int64_t broadcast_chunk_nbytes_, chunk_nbytes_;
  const int chunks_in_flight_;
  const std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  int rank_ = 0;
  std::vector<AlgorithmRow> rows_;
  uint16_t next_sequence_ = 0;
  std::array<std::weak_ptr<void>, kSequences> turns_;
};

}  // namespace

std::unique_ptr<Communicator> MakeAlgorithmCommunicator(Transport& transport,
                                                        std::vector<int> members, uint16_t channel,
                                                        const AlgorithmOptions& options) {
  return std::make_unique<AlgorithmCommunicator>(transport, std::move(members), channel, options);
}

}  // namespace gradred::comm
