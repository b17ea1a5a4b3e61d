// A world whose data communicators ask a cargo for ranges of random sizes, as those that stream
// do, each at an address of its own, and with rubbish around it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "comm/alloc_on_all.h"
#include "forwarding_world.h"
#include "testing.h"

namespace testing {

class Chunks final : public gradred::comm::Cargo {
 public:
  Chunks(gradred::comm::CargoPtr cargo, std::mt19937* random)
      : cargo_(std::move(cargo)), random_(*random) {}
  void Pack(gradred::reduce::Range all, void* at) override {
    Each(all, [&](gradred::reduce::Range range, char* chunk) {
      std::memset(chunk, 0x5a, range.nbytes());
      cargo_->Pack(range, chunk);
      std::memcpy(static_cast<char*>(at) + range.begin, chunk, range.nbytes());
    });
  }
  void Unpack(gradred::reduce::Range all, const void* at) override {
    Each(all, [&](gradred::reduce::Range range, char* chunk) {
      std::memcpy(chunk, static_cast<const char*>(at) + range.begin, range.nbytes());
      cargo_->Unpack(range, chunk);
    });
  }

 private:
  template <class F>
  void Each(gradred::reduce::Range all, F f) {
    for (int64_t begin = all.begin; begin < all.end;) {
      const int64_t nbytes = gradred::reduce::kAlign * (1 + random_() % 8);
      const int64_t end = std::min(all.end, begin + nbytes);
      std::vector<char> chunk(end - begin + gradred::reduce::kAlign);
      const auto address = reinterpret_cast<uintptr_t>(chunk.data());
      f({begin, end}, chunk.data() + (gradred::reduce::AlignUp(address) - address));
      begin = end;
    }
  }
  const gradred::comm::CargoPtr cargo_;
  std::mt19937& random_;
};

class ChunkingCommunicator final : public gradred::comm::Communicator {
 public:
  ChunkingCommunicator(std::unique_ptr<gradred::comm::Communicator> base, unsigned seed, int rooms)
      : base_(std::move(base)), random_(seed), rooms_(rooms) {}

  gradred::comm::WorkPtr AllReduceCargo(gradred::comm::LayoutPtr layout,
                                        gradred::comm::CargoPtr cargo) override {
    return base_->AllReduceCargo(std::move(layout),
                                 std::make_shared<Chunks>(std::move(cargo), &random_));
  }

  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  std::string name() const override { return base_->name(); }
  gradred::comm::Transport& transport() override { return base_->transport(); }
  gradred::comm::SegmentPtr Alloc(int64_t nbytes) override { return base_->Alloc(nbytes); }
  gradred::comm::WorkPtr AllocOnAll(int64_t nbytes, gradred::comm::SegmentPtr* segment) override {
    if (rooms_-- != 0) return base_->AllocOnAll(nbytes, segment);
    segment->reset();  // no room here
    return gradred::comm::AgreeOnSegment(*base_, nullptr, segment);
  }
  gradred::comm::WorkPtr AllReduce(gradred::comm::Segment& segment, int64_t offset,
                                   gradred::comm::LayoutPtr layout) override {
    return base_->AllReduce(segment, offset, std::move(layout));
  }
  gradred::comm::WorkPtr ReduceScatter(gradred::comm::Segment& segment, int64_t offset,
                                       gradred::comm::LayoutPtr layout,
                                       std::vector<gradred::reduce::Range> parts) override {
    return base_->ReduceScatter(segment, offset, std::move(layout), std::move(parts));
  }
  gradred::comm::WorkPtr AllGather(gradred::comm::Segment& segment, int64_t offset,
                                   std::vector<gradred::reduce::Range> parts) override {
    return base_->AllGather(segment, offset, std::move(parts));
  }
  gradred::comm::WorkPtr AllGatherV(const void* mine, void* all,
                                    std::vector<int64_t> nbytes) override {
    return base_->AllGatherV(mine, all, std::move(nbytes));
  }
  gradred::comm::WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return base_->Broadcast(data, nbytes, root);
  }
  gradred::comm::WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                                   std::vector<int64_t> recv) override {
    return base_->AllToAllV(in, std::move(send), out, std::move(recv));
  }
  gradred::comm::WorkPtr Barrier() override { return base_->Barrier(); }
  gradred::comm::WorkPtr Union(std::string* blob, gradred::comm::MergeFunction merge) override {
    return base_->Union(blob, std::move(merge));
  }
  double average_residual() const override { return base_->average_residual(); }

 private:
  std::unique_ptr<gradred::comm::Communicator> base_;
  std::mt19937 random_;
  int rooms_;
};

class ChunkingWorld final : public ForwardingWorld {
 public:
  // `rooms`: times that the rank has room for memory that all ranks must have; -1: always.
  explicit ChunkingWorld(std::unique_ptr<gradred::comm::World> base, int rooms = -1)
      : ForwardingWorld(std::move(base)), rooms_(rooms) {}
  std::unique_ptr<gradred::comm::Communicator> MakeData(const std::vector<int>& members,
                                                        int lane) override {
    return std::make_unique<ChunkingCommunicator>(ForwardingWorld::MakeData(members, lane),
                                                  topology().rank + 1, rooms_);
  }

 private:
  const int rooms_;
};

}  // namespace testing
