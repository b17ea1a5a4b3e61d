#include "comm/shm/communicator.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "base/graveyard.h"
#include "comm/algorithm_communicator.h"
#include "comm/shm/segment.h"
#include "comm/tag_turn.h"

namespace gradred::comm::shm {
namespace {

// Note [Reductions in shared memory]
// Each rank's segment is its own slot. A rank *arrives* by a message that says where its slot is
// and that its contents are final; after all have arrived, rank r reduces its part over all slots
// into its own slot (ReduceScatter) or pushes its part into all slots (AllGather), then sends
// *done* to all. Its Work ends when all are done: nobody reads or writes its slot from then on, so
// the rank may reuse the slot without a word to anyone. Pulling instead would need a third message
// for that: a rank that has pulled everything cannot know whether the others have pulled from it.
// An allreduce does both in one pass, block by block while the block is in cache: rank r alone
// reads part r of the slots, so it may overwrite that part in each slot as soon as it has reduced
// it.

enum class What : uint32_t { kReduceScatter = 1, kAllGather = 2, kAllReduce = 3 };

const char* WhatName(What what) {
  switch (what) {
    case What::kReduceScatter:
      return "reduce_scatter";
    case What::kAllGather:
      return "allgather";
    case What::kAllReduce:
      return "allreduce";
  }
  return "unknown";
}

// The message of arrival.
struct Arrival {
  MemoryKey key;
  int64_t offset = 0;
  int64_t nbytes = 0;  // that the collective covers
  What what{};
  uint32_t unused = 0;
};

// What outstanding messages point to.
struct Mail {
  Arrival mine;
  std::vector<Arrival> theirs;
  std::vector<WorkPtr> arrivals, dones;
};

// Stops at the first unfinished one: its Poll has moved the messages of all.
bool PollAll(std::vector<WorkPtr>& works) {
  while (!works.empty()) {
    if (!works.back()->Poll()) return false;
    ThrowIfError(works.back()->status());
    works.pop_back();
  }
  return true;
}

class ShmCommunicator;

class SharedWork final : public Work {
 public:
  SharedWork(ShmCommunicator* owner, SharedSegment& segment, int64_t offset, What what,
             LayoutPtr layout, std::vector<reduce::Range> parts, TagTurn turn);
  ~SharedWork() override {
    // Messages still point there: see Work on the memory of unfinished Works.
    if (step_ != Step::kWait && step_ != Step::kFinished) Bury(mail_);
  }

 private:
  enum class Step { kWait, kArrive, kMove, kDone, kFinished };

  bool Advance() override;
  void Arrive();
  void Meet();
  bool Move();

  ShmCommunicator* owner_;
  What what_;
  LayoutPtr layout_;
  std::vector<reduce::Range> parts_;
  TagTurn turn_;
  std::unique_ptr<Mail> mail_;
  std::vector<char*> slots_;  // of all ranks, at the offset
  int64_t at_ = 0;            // of my part, done so far
  Step step_ = Step::kWait;
};

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(Transport& transport, std::vector<int> members, uint16_t channel,
                  const ShmOptions& options)
      : transport_(transport),
        members_(std::move(members)),
        channel_(channel),
        options_(options),
        plain_(MakeAlgorithmCommunicator(transport, members_, static_cast<uint16_t>(channel + 1))) {
    const auto me = std::find(members_.begin(), members_.end(), transport.rank());
    if (me == members_.end()) {
      throw Error(Kind::kInvalidArgument, "rank " + std::to_string(transport.rank()) +
                                              " is no member of its communicator in shared memory");
    }
    rank_ = static_cast<int>(me - members_.begin());
    const int scale_size = options.scale_size > 0 ? options.scale_size : size();
    while ((1 << shift_) < scale_size) ++shift_;
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string name() const override { return "shared memory in place"; }
  Transport& transport() override { return transport_; }

  SegmentPtr Alloc(int64_t nbytes) override {
    const std::string purpose = "the fusion buffer of rank " + std::to_string(transport_.rank());
    return std::make_unique<SharedSegment>(
        Memory::Create(nbytes, options_.nonce, options_.naming, size() - 1, purpose));
  }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    auto parts = reduce::Split(layout->nbytes(), size());
    return Start(segment, offset, What::kAllReduce, std::move(layout), std::move(parts));
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

  double average_residual() const override { return std::ldexp(1.0, shift_) / size(); }

  float node_scale() const { return std::ldexp(1.0F, -shift_); }
  const std::vector<int>& members() const { return members_; }
  const ShmOptions& options() const { return options_; }
  Attachments& attachments() { return attachments_; }

 private:
  WorkPtr Start(Segment& segment, int64_t offset, What what, LayoutPtr layout,
                std::vector<reduce::Range> parts);

  Transport& transport_;
  std::vector<int> members_;
  uint16_t channel_;
  ShmOptions options_;
  std::unique_ptr<Communicator> plain_;
  int rank_ = 0;
  int shift_ = 0;  // log2 of what averages of halves are divided by here
  uint16_t next_ = 0;
  std::array<std::weak_ptr<void>, kSequences> turns_;
  Attachments attachments_;
};

int64_t EndOf(const std::vector<reduce::Range>& parts) {
  int64_t end = 0;
  for (const reduce::Range& part : parts) end = std::max(end, part.end);
  return end;
}

WorkPtr ShmCommunicator::Start(Segment& segment, int64_t offset, What what, LayoutPtr layout,
                               std::vector<reduce::Range> parts) {
  const std::string where =
      "rank " + std::to_string(transport_.rank()) + ": " + WhatName(what) + " in shared memory";
  auto* shared = dynamic_cast<SharedSegment*>(&segment);
  if (shared == nullptr) {
    throw Error(Kind::kInvalidArgument, where + ": the segment is not of this communicator");
  }
  const int64_t nbytes = std::max(EndOf(parts), layout == nullptr ? 0 : layout->nbytes());
  if (static_cast<int>(parts.size()) != size() || offset < 0 || offset % reduce::kAlign != 0 ||
      offset + nbytes > segment.nbytes()) {
    throw Error(Kind::kInvalidArgument, where + ": expected " + std::to_string(size()) +
                                            " parts within " + std::to_string(segment.nbytes()) +
                                            " bytes, got " + std::to_string(parts.size()) +
                                            " parts of " + std::to_string(nbytes) +
                                            " bytes at offset " + std::to_string(offset));
  }
  TagTurn turn{{channel_, next_}, turns_[next_], std::make_shared<char>()};
  turns_[next_] = turn.mine;
  next_ = static_cast<uint16_t>((next_ + 1) % kSequences);
  auto work = std::make_unique<SharedWork>(this, *shared, offset, what, std::move(layout),
                                           std::move(parts), std::move(turn));
  work->Poll();  // arrives at once
  return work;
}

SharedWork::SharedWork(ShmCommunicator* owner, SharedSegment& segment, int64_t offset, What what,
                       LayoutPtr layout, std::vector<reduce::Range> parts, TagTurn turn)
    : owner_(owner),
      what_(what),
      layout_(std::move(layout)),
      parts_(std::move(parts)),
      turn_(std::move(turn)),
      mail_(new Mail),
      slots_(static_cast<size_t>(owner->size())) {
  const auto rank = static_cast<size_t>(owner_->rank());
  slots_[rank] = static_cast<char*>(segment.data()) + offset;
  at_ = parts_[rank].begin;
  const int64_t nbytes = std::max(EndOf(parts_), layout_ == nullptr ? 0 : layout_->nbytes());
  mail_->mine = {segment.key(), offset, nbytes, what, 0};
  mail_->theirs.resize(slots_.size());
}

void SharedWork::Arrive() {
  const int rank = owner_->rank(), size = owner_->size();
  Transport& transport = owner_->transport();
  for (int i = 1; i < size; ++i) {  // each rank starts with another peer
    const int peer = (rank + i) % size;
    const int to = owner_->members()[static_cast<size_t>(peer)];
    mail_->arrivals.push_back(
        transport.Recv(to, turn_.tag, &mail_->theirs[static_cast<size_t>(peer)], sizeof(Arrival)));
    mail_->dones.push_back(transport.Recv(to, turn_.tag, nullptr, 0));
    mail_->arrivals.push_back(transport.Send(to, turn_.tag, &mail_->mine, sizeof(Arrival)));
  }
}

bool SharedWork::Advance() {
  if (step_ == Step::kWait) {
    if (!turn_.HasCome()) return false;
    step_ = Step::kArrive;
    Arrive();
  }
  if (step_ == Step::kArrive) {
    if (!PollAll(mail_->arrivals)) return false;
    Meet();
    step_ = Step::kMove;
  }
  if (step_ == Step::kMove) {
    if (!Move()) {
      owner_->transport().bell().Ring();  // there is more to do: the owner must not sleep
      return false;
    }
    for (int i = 1; i < owner_->size(); ++i) {
      const int peer = (owner_->rank() + i) % owner_->size();
      mail_->dones.push_back(owner_->transport().Send(owner_->members()[static_cast<size_t>(peer)],
                                                      turn_.tag, nullptr, 0));
    }
    step_ = Step::kDone;
  }
  if (step_ == Step::kDone) {
    if (!PollAll(mail_->dones)) return false;
    step_ = Step::kFinished;
    turn_.mine.reset();
  }
  return true;
}

// All have arrived: finds their slots.
void SharedWork::Meet() {
  const Arrival& mine = mail_->mine;
  for (int peer = 0; peer < owner_->size(); ++peer) {
    if (peer == owner_->rank()) continue;
    const Arrival& theirs = mail_->theirs[static_cast<size_t>(peer)];
    if (theirs.what != mine.what || theirs.offset != mine.offset || theirs.nbytes != mine.nbytes ||
        theirs.offset + theirs.nbytes > theirs.key.nbytes) {
      const auto text = [](const Arrival& a) {
        return std::string(WhatName(a.what)) + " of " + std::to_string(a.nbytes) +
               " bytes at offset " + std::to_string(a.offset);
      };
      throw Error(Kind::kInternal,
                  "rank " + std::to_string(owner_->transport().rank()) +
                      " in shared memory: expected " + text(mine) + ", rank " +
                      std::to_string(owner_->members()[static_cast<size_t>(peer)]) + " came with " +
                      text(theirs) + " in memory of " + std::to_string(theirs.key.nbytes) +
                      " bytes; the ranks issue collectives in different orders");
    }
    slots_[static_cast<size_t>(peer)] =
        owner_->attachments().Find(peer, theirs.key) + theirs.offset;
  }
}

// True when my part is done; false after poll_nbytes.
bool SharedWork::Move() {
  const auto rank = static_cast<size_t>(owner_->rank());
  const int n = owner_->size();
  if (n == 1 && owner_->node_scale() == 1.0F) return true;
  const int64_t end = parts_[rank].end;
  const int64_t block = reduce::AlignUp(owner_->options().block_nbytes);
  int64_t budget = owner_->options().poll_nbytes;
  while (at_ < end) {
    if (budget <= 0) return false;
    const reduce::Range range{at_, std::min(at_ + block, end)};
    if (what_ != What::kAllGather) {
      layout_->ReduceNode(slots_[rank], reinterpret_cast<const void* const*>(slots_.data()), n,
                          range, owner_->node_scale());
    }
    if (what_ != What::kReduceScatter) {
      for (int i = 1; i < n; ++i) {
        char* slot = slots_[(rank + static_cast<size_t>(i)) % static_cast<size_t>(n)];
        std::memcpy(slot + range.begin, slots_[rank] + range.begin,
                    static_cast<size_t>(range.nbytes()));
      }
    }
    at_ = range.end;
    budget -= range.nbytes() * n;
  }
  return true;
}

}  // namespace

std::unique_ptr<Communicator> MakeCommunicator(Transport& transport, std::vector<int> members,
                                               uint16_t channel, const ShmOptions& options) {
  return std::make_unique<ShmCommunicator>(transport, std::move(members), channel, options);
}

}  // namespace gradred::comm::shm
