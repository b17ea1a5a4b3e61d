#include "comm/shm/job.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace gradred::comm::shm {

Common::Common(Transport& transport, std::vector<int> members, Tag tag, const ShmOptions& options)
    : transport(transport),
      members(std::move(members)),
      options(options),
      opening(transport, this->members, tag) {
  const auto me = std::find(this->members.begin(), this->members.end(), transport.rank());
  if (me == this->members.end()) {
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(transport.rank()) +
                                            " is no member of its communicator in shared memory");
  }
  rank = static_cast<int>(me - this->members.begin());
  const int scale_size = options.scale_size > 0 ? options.scale_size : size();
  while ((1 << shift) < scale_size) ++shift;
  for (int i = 1; i < size(); ++i) {  // each rank starts with another peer
    const int peer = this->members[static_cast<size_t>((rank + i) % size())];
    bells.push_back(transport.BellOf(peer));
    if (bells.back() == nullptr) {
      throw Error(Kind::kInvalidArgument, Where() + ": rank " + std::to_string(peer) +
                                              " is a member, but shares no memory with this rank");
    }
  }
}

BoardShape Common::shape() const {
  return {size(), reduce::AlignUp(options.small_nbytes), options.window_chunks};
}

float Common::node_scale() const { return std::ldexp(1.0F, -shift); }

std::string Common::Where() const {
  return "rank " + std::to_string(transport.rank()) + " in shared memory";
}

void Common::Pass(Gate& gate, uint64_t round) {
  const uint64_t before = gate.count.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == (round + 1) * members.size()) {
    for (Doorbell* bell : bells) bell->Ring();
  }
}

Job::Job(Common& common, What what, int64_t offset, int64_t nbytes)
    : common_(common), what_(what), offset_(offset), nbytes_(nbytes) {}

void Job::Arrive(const MemoryKey& key) {
  common_.board->arrival(number, common_.rank) = {key, offset_, nbytes_, what_, 0};
  common_.Pass(common_.board->arrived(number), Round());
}

bool Job::AllArrived() {
  if (!common_.AllPassed(common_.board->arrived(number), Round())) return false;
  for (int peer = 0; peer < common_.size(); ++peer) {
    const Arrival theirs = Theirs(peer);
    if (theirs.what == what_ && theirs.offset == offset_ && theirs.nbytes == nbytes_) continue;
    const auto text = [](What what, int64_t nbytes, int64_t offset) {
      return std::string(WhatName(what)) + " of " + std::to_string(nbytes) + " bytes at offset " +
             std::to_string(offset);
    };
    throw Error(Kind::kInternal,
                common_.Where() + ": expected " + text(what_, nbytes_, offset_) + ", rank " +
                    std::to_string(common_.members[static_cast<size_t>(peer)]) + " came with " +
                    text(theirs.what, theirs.nbytes, theirs.offset) +
                    "; the ranks issue collectives in different orders");
  }
  return true;
}

char* Job::MemoryOf(int peer, int64_t nbytes) {
  const MemoryKey key = Theirs(peer).key;
  if (key.nbytes < nbytes) {
    throw Error(Kind::kInternal,
                common_.Where() + ": " + WhatName(what_) + " needs " + std::to_string(nbytes) +
                    " bytes of rank " + std::to_string(common_.members[static_cast<size_t>(peer)]) +
                    ", which came with memory of " + std::to_string(key.nbytes) + " bytes");
  }
  return common_.attachments.Find(peer, key);
}

void Queue::Add(std::shared_ptr<Job> job) {
  job->number = next_++;
  jobs_.push_back(std::move(job));
}

bool Queue::BoardIsOpen() {
  if (common.board != nullptr) {
    // The first rank's messages may still be on their way.
    if (common.opening.started()) common.opening.Poll();
    return true;
  }
  const BoardShape shape = common.shape();
  if (common.rank == 0) {
    common.board = std::make_unique<Board>(
        Memory::Create(Board::NbytesFor(shape), common.options.nonce, common.options.naming,
                       common.size() - 1,
                       "the flags of " + std::to_string(common.size()) + " ranks of one machine"),
        shape);
    common.opening.Start(&common.board->key());
    return true;
  }
  if (!common.opening.started()) common.opening.Start(nullptr);
  if (!common.opening.Poll()) return false;
  common.board = std::make_unique<Board>(Memory::Attach(common.opening.key()), shape);
  return true;
}

void Queue::Advance() {
  common.transport.ThrowIfAborted();
  ThrowIfError(failure_);
  try {
    if (BoardIsOpen()) {
      int64_t budget = common.options.poll_nbytes;
      for (bool moved = true; moved && budget > 0;) {
        moved = false;
        for (const auto& job : jobs_) {
          while (!job->finished && budget > 0 && job->Step(&budget)) moved = true;
        }
        while (!jobs_.empty() && jobs_.front()->finished) {
          jobs_.pop_front();
          ++common.oldest;
        }
      }
      common.transport.CountMoved(common.options.poll_nbytes - budget);
      if (budget <= 0) {
        common.transport.bell().Ring();  // there may be more to do: the owner must not sleep
        return;
      }
    }
  } catch (...) {
    // The order of works is broken from here on: nothing later can succeed.
    failure_ = CurrentException();
    throw;
  }
  common.transport.Progress();
}

void Queue::Abandon(const Job* job) {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(),
                                  [job](const auto& other) { return other.get() == job; });
  if (found == jobs_.end()) return;
  jobs_.erase(found);
  if (failure_.ok()) {
    failure_ = {Kind::kInternal, common.Where() + ": an unfinished work was given up"};
  }
}

namespace {

class SharedWork final : public Work {
 public:
  SharedWork(std::shared_ptr<Queue> queue, std::shared_ptr<Job> job)
      : queue_(std::move(queue)), job_(std::move(job)) {}
  ~SharedWork() override {
    if (!job_->finished) queue_->Abandon(job_.get());
  }

 private:
  bool Advance() override {
    // A job that finished while another was polled stays finished, whatever became of the others.
    if (!job_->finished) queue_->Advance();
    return job_->finished;
  }

  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Job> job_;
};

}  // namespace

WorkPtr MakeWork(std::shared_ptr<Queue> queue, std::unique_ptr<Job> job) {
  const std::shared_ptr<Job> shared = std::move(job);
  queue->Add(shared);
  auto work = std::make_unique<SharedWork>(std::move(queue), shared);
  work->Poll();  // arrives at once
  return work;
}

}  // namespace gradred::comm::shm
