// Two transports as one: shared memory to the ranks of the same node, the fabric's messages to the
// others.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "comm/transport.h"

namespace gradred::comm {

class RoutedTransport final : public Transport {
 public:
  // near_of[r]: rank r's number in `near`, or -1 where `far` serves it. `far` covers all ranks and
  // is numbered like the result; null when near serves all. The bell is that of `near`.
  RoutedTransport(int rank, std::vector<int> near_of, std::unique_ptr<Transport> near,
                  std::unique_ptr<Transport> far);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(near_of_.size()); }
  WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) override;
  WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) override;
  void Post(int peer, const std::string& bytes) override;
  bool TakePosted(Message* message) override;
  void Progress() override;
  Doorbell& bell() override { return near_->bell(); }
  Doorbell* BellOf(int peer) override {
    const int number = near_of_[static_cast<size_t>(peer)];
    return number >= 0 ? near_->BellOf(number) : nullptr;
  }
  bool MustPoll() const override {
    return near_->MustPoll() || (far_ != nullptr && far_->MustPoll());
  }
  void Abort(const Status& cause) override;
  void ThrowIfAborted() override { near_->ThrowIfAborted(); }
  int64_t moved_nbytes() const override {
    return near_->moved_nbytes() + far_moved_.load(std::memory_order_relaxed);
  }
  void CountMoved(int64_t nbytes) override { near_->CountMoved(nbytes); }
  std::shared_ptr<NativeReduce> MakeNative(const std::vector<int>& members) override {
    return far_ == nullptr ? nullptr : far_->MakeNative(members);
  }
  // Bytes of the messages sent through `far`. Any thread.
  int64_t far_sent_nbytes() const { return far_sent_.load(std::memory_order_relaxed); }

  // Ends the messages to ranks that `near` does not reach; the bell stays. When nothing else is
  // done with this object any more.
  void DropFar() {
    NoteFar();
    far_.reset();
  }

 private:
  struct Route {
    Transport* transport;
    int number;
  };
  Route RouteTo(int peer);
  void NoteFar();

  int rank_;
  std::vector<int> near_of_;       // [size]
  std::vector<int> rank_of_near_;  // [near_->size()]
  std::unique_ptr<Transport> near_, far_;
  std::atomic<int64_t> far_sent_{0};
  std::atomic<int64_t> far_moved_{0};  // far_'s counter, which other threads may read after DropFar
};

}  // namespace gradred::comm
