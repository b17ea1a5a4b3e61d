// A transport that is as unkind as the contract allows, and a little worse: for tests.
#pragma once

#include <memory>
#include <random>
#include <utility>

#include "comm/transport.h"

namespace testing {

struct Faults {
  uint64_t seed = 1;
  int longest_delay =
      0;  // polls by which a finished transfer is reported late: at random, so in any order
  int truncated_send = -1;  // the message of the n-th send lacks its last byte
  int dead_peer = -1;       // nothing comes from or goes to this rank
  int stuck_send = -1;      // the n-th send stays under way until an abort
};

class FaultyTransport : public gradred::comm::Transport {
 public:
  using WorkPtr = gradred::comm::WorkPtr;
  using Tag = gradred::comm::Tag;

  // `inner` must outlive this.
  FaultyTransport(gradred::comm::Transport& inner, Faults faults)
      : inner_(inner), faults_(faults), random_(faults.seed * 1000 + inner.rank()) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) override {
    if (peer == faults_.dead_peer) return Late(nullptr);
    if (sends_ == faults_.stuck_send) return ++sends_, Late(nullptr);
    if (sends_++ == faults_.truncated_send && nbytes > 0) --nbytes;
    return Late(inner_.Send(peer, tag, data, nbytes));
  }
  WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) override {
    ++receives_;
    if (peer == faults_.dead_peer) return Late(nullptr);
    return Late(inner_.Recv(peer, tag, data, nbytes));
  }
  void Post(int peer, const std::string& bytes) override {
    if (peer != faults_.dead_peer) inner_.Post(peer, bytes);
  }
  bool TakePosted(gradred::comm::Message* message) override { return inner_.TakePosted(message); }
  void Progress() override { inner_.Progress(); }
  gradred::Doorbell& bell() override { return inner_.bell(); }
  gradred::Doorbell* BellOf(int peer) override { return inner_.BellOf(peer); }
  bool MustPoll() const override { return faults_.longest_delay > 0 || inner_.MustPoll(); }
  void Abort(const gradred::Status& cause) override { inner_.Abort(cause); }
  int64_t moved_nbytes() const override { return inner_.moved_nbytes(); }
  void ThrowIfAborted() override { inner_.ThrowIfAborted(); }

  int sends() const { return sends_; }  // so far
  int receives() const { return receives_; }

 private:
  class LateWork : public gradred::comm::Work {
   public:
    LateWork(FaultyTransport& owner, WorkPtr inner, int delay)
        : owner_(owner), inner_(std::move(inner)), delay_(delay) {}

   private:
    bool Advance() override {
      if (!inner_) return AbortedWhileDead();
      if (!inner_->Poll()) return false;
      gradred::ThrowIfError(inner_->status());
      return delay_-- <= 0;
    }
    // A transfer with a dead peer, or a stuck one, ends by an abort only: a receive that nothing
    // matches shows whether that has come.
    bool AbortedWhileDead() {
      if (!probe_) probe_ = owner_.inner_.Recv(owner_.rank(), kNobody, nullptr, 0);
      if (probe_->Poll()) gradred::ThrowIfError(probe_->status());
      return false;
    }
    FaultyTransport& owner_;
    WorkPtr inner_, probe_;
    int delay_;
  };
  static constexpr Tag kNobody{gradred::comm::kChannels - 2, 0};

  WorkPtr Late(WorkPtr inner) {
    const int delay =
        faults_.longest_delay > 0 ? static_cast<int>(random_() % (faults_.longest_delay + 1)) : 0;
    return std::make_unique<LateWork>(*this, std::move(inner), delay);
  }

  gradred::comm::Transport& inner_;
  const Faults faults_;
  std::mt19937_64 random_;
  int sends_ = 0, receives_ = 0;
};

}  // namespace testing
