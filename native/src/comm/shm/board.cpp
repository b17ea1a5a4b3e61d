#include "comm/shm/board.h"

#include <string>
#include <utility>

#include "base/graveyard.h"
#include "base/status.h"

namespace gradred::comm::shm {

const char* WhatName(What what) {
  switch (what) {
    case What::kReduceScatter:
      return "reduce_scatter";
    case What::kAllGather:
      return "allgather";
    case What::kAllReduce:
      return "allreduce";
    case What::kCargo:
      return "allreduce through a window";
  }
  return "unknown";
}

namespace {

int64_t GateCount(const BoardShape& shape) { return 2 * (kWorksOnBoard + shape.chunks); }

int64_t ArrivalCount(const BoardShape& shape) { return int64_t{kWorksOnBoard} * shape.members; }

}  // namespace

int64_t Board::NbytesFor(const BoardShape& shape) {
  return GateCount(shape) * static_cast<int64_t>(sizeof(Gate)) +
         ArrivalCount(shape) * static_cast<int64_t>(sizeof(Arrival)) +
         2 * shape.members * shape.small_nbytes;
}

Board::Board(std::unique_ptr<Memory> memory, const BoardShape& shape)
    : memory_(std::move(memory)), shape_(shape) {
  if (memory_->nbytes() != NbytesFor(shape)) {
    throw Error(Kind::kTransportError, "the board of " + std::to_string(shape.members) +
                                           " ranks in shared memory: expected " +
                                           std::to_string(NbytesFor(shape)) + " bytes, got " +
                                           std::to_string(memory_->nbytes()) +
                                           "; the ranks have different settings");
  }
  gates_ = reinterpret_cast<Gate*>(memory_->data());
  arrivals_ = reinterpret_cast<Arrival*>(gates_ + GateCount(shape));
  small_ = reinterpret_cast<char*>(arrivals_ + ArrivalCount(shape));
}

BoardOpening::BoardOpening(Transport& transport, std::vector<int> members, Tag tag)
    : transport_(transport), members_(std::move(members)), tag_(tag) {}

BoardOpening::~BoardOpening() {
  // Messages still point there: see Work on the memory of unfinished Works.
  if (mail_ != nullptr && !mail_->works.empty()) Bury(mail_);
}

void BoardOpening::Start(const MemoryKey* key) {
  mail_.reset(new Mail);
  if (key == nullptr) {
    mail_->works.push_back(transport_.Recv(members_[0], tag_, &mail_->key, sizeof mail_->key));
    return;
  }
  mail_->key = *key;
  for (size_t i = 1; i < members_.size(); ++i) {
    mail_->works.push_back(transport_.Send(members_[i], tag_, &mail_->key, sizeof mail_->key));
  }
}

bool BoardOpening::Poll() {
  while (!mail_->works.empty()) {
    if (!mail_->works.back()->Poll()) return false;
    ThrowIfError(mail_->works.back()->status());
    mail_->works.pop_back();
  }
  return true;
}

}  // namespace gradred::comm::shm
