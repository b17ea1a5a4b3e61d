#include "comm/shm/communicator.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/graveyard.h"
#include "comm/algorithm_communicator.h"
#include "comm/alloc_on_all.h"
#include "comm/shm/job.h"
#include "comm/shm/segment.h"

namespace gradred::comm::shm {
namespace {

// Attaches the segments of all ranks; fails with kUnsupported where that cannot be.
class AttachWork final : public Work {
 public:
  AttachWork(std::shared_ptr<Queue> queue, Communicator& plain, Segment* segment)
      : queue_(std::move(queue)), mail_(new Mail) {
    const auto size = static_cast<size_t>(plain.size());
    if (segment != nullptr) mail_->mine = static_cast<SharedSegment&>(*segment).key();
    mail_->all.resize(size);
    work_ = plain.AllGatherV(&mail_->mine, mail_->all.data(),
                             std::vector<int64_t>(size, sizeof(MemoryKey)));
  }
  ~AttachWork() override {
    if (work_ != nullptr) Bury(mail_);  // unfinished: see Work
  }

 private:
  struct Mail {
    MemoryKey mine;  // of no bytes: there is none
    std::vector<MemoryKey> all;
  };

  bool Advance() override {
    if (!work_->Poll()) return false;
    ThrowIfError(work_->status());
    work_.reset();
    if (mail_->mine.nbytes == 0) return true;  // there will be nothing to reach
    try {
      for (int r = 0; r < queue_->common.size(); ++r) {
        const MemoryKey& key = mail_->all[static_cast<size_t>(r)];
        if (r != queue_->common.rank && key.nbytes > 0) queue_->common.attachments.Find(r, key);
      }
    } catch (const Error& error) {
      throw Error(Kind::kUnsupported, error.what());
    }
    return true;
  }

  const std::shared_ptr<Queue> queue_;
  std::unique_ptr<Mail> mail_;
  WorkPtr work_;
};

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(Transport& transport, const std::vector<int>& members, uint16_t channel,
                  const ShmOptions& options)
      : queue_(std::make_shared<Queue>(transport, members, Tag{channel, 0}, options)),
        plain_(MakeAlgorithmCommunicator(transport, members, static_cast<uint16_t>(channel + 1))) {}

  int rank() const override { return common().rank; }
  int size() const override { return common().size(); }
  std::string name() const override { return "shared memory in place"; }
  Transport& transport() override { return common().transport; }

  SegmentPtr Alloc(int64_t nbytes) override {
    const std::string purpose = "the fusion buffer of rank " + std::to_string(transport().rank());
    return std::make_unique<SharedSegment>(Memory::Create(
        nbytes, common().options.nonce, common().options.naming, size() - 1, purpose));
  }
  WorkPtr AllocOnAll(int64_t nbytes, SegmentPtr* segment) override {
    *segment = AllocOrLog(*this, nbytes);
    auto attach = std::make_unique<AttachWork>(queue_, *plain_, segment->get());
    return AgreeOnSegment(*plain_, std::move(attach), segment);
  }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    auto parts = IsSmall(layout->nbytes()) ? std::vector<reduce::Range>()  // it needs none
                                           : reduce::Split(layout->nbytes(), size());
    return Start(segment, offset, What::kAllReduce, std::move(layout), std::move(parts));
  }
  WorkPtr AllReduceCargo(LayoutPtr layout, CargoPtr cargo) override {
    return MakeWork(queue_, layout->nbytes() <= common().options.small_nbytes
                                ? MakeSmallCargoJob(common(), std::move(layout), std::move(cargo))
                                : MakeCargoJob(common(), std::move(layout), std::move(cargo)));
  }
  int64_t window_nbytes() const override {
    const Common& c = common();
    const bool mine = c.rank == 0 && c.board != nullptr;
    return (mine ? c.board->nbytes() : 0) + (c.window != nullptr ? c.window->nbytes() : 0);
  }
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<reduce::Range> parts) override {
    return Start(segment, offset, What::kReduceScatter, std::move(layout), std::move(parts));
  }
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<reduce::Range> parts) override {
    return Start(segment, offset, What::kAllGather, nullptr, std::move(parts));
  }

  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    return plain_->AllGatherV(mine, all, std::move(nbytes));
  }
  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return plain_->Broadcast(data, nbytes, root);
  }
  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    return plain_->AllToAllV(in, std::move(send), out, std::move(recv));
  }
  WorkPtr Barrier() override { return plain_->Barrier(); }
  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    return plain_->Union(blob, std::move(merge));
  }

  double average_residual() const override { return std::ldexp(1.0, common().shift) / size(); }

 private:
  Common& common() { return queue_->common; }
  const Common& common() const { return queue_->common; }
  // Of a reduction in a segment, which needs no parts then.
  bool IsSmall(int64_t nbytes) const {
    return nbytes <= common().options.small_nbytes && size() > 1;
  }
  WorkPtr Start(Segment& segment, int64_t offset, What what, LayoutPtr layout,
                std::vector<reduce::Range> parts);

  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Communicator> plain_;
};

WorkPtr ShmCommunicator::Start(Segment& segment, int64_t offset, What what, LayoutPtr layout,
                               std::vector<reduce::Range> parts) {
  const auto where = [&] { return common().Where() + ": " + WhatName(what); };
  auto* shared = dynamic_cast<SharedSegment*>(&segment);
  if (shared == nullptr) {
    throw Error(Kind::kInvalidArgument, where() + ": the segment is not of this communicator");
  }
  int64_t nbytes = layout == nullptr ? 0 : layout->nbytes();
  for (const reduce::Range& part : parts) nbytes = std::max(nbytes, part.end);
  const bool small = IsSmall(nbytes);
  const bool whole = small && what == What::kAllReduce;
  if ((!whole && static_cast<int>(parts.size()) != size()) || offset < 0 ||
      offset % reduce::kAlign != 0 || offset + nbytes > segment.nbytes()) {
    throw Error(Kind::kInvalidArgument, where() + ": expected " + std::to_string(size()) +
                                            " parts within " + std::to_string(segment.nbytes()) +
                                            " bytes, got " + std::to_string(parts.size()) +
                                            " parts of " + std::to_string(nbytes) +
                                            " bytes at offset " + std::to_string(offset));
  }
  return MakeWork(
      queue_, (small ? MakeSmallJob : MakeInPlaceJob)(common(), *shared, offset, what,
                                                      std::move(layout), std::move(parts), nbytes));
}

}  // namespace

std::unique_ptr<Communicator> MakeCommunicator(Transport& transport, std::vector<int> members,
                                               uint16_t channel, const ShmOptions& options) {
  return std::make_unique<ShmCommunicator>(transport, members, channel, options);
}

}  // namespace gradred::comm::shm
