// What a transport over MPI shares with its Works, which may outlive it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "comm/mpi/mpi_calls.h"

namespace gradred::comm::mpi {

template <class Abi>
struct TransportState {
  std::shared_ptr<Mpi<Abi>> mpi;
  typename Abi::Comm comm;
  std::atomic<bool> aborted{false};
  std::atomic<int> unfinished{0};  // Works
  std::atomic<int64_t> moved_nbytes{0};
  std::mutex mutex;
  Status cause;  // under `mutex`

  void ThrowIfAborted() {
    if (!aborted.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> lock(mutex);
    throw Error(cause);
  }
};

// Counts a Work among the unfinished ones of its transport, until it ends.
template <class Abi>
class Unfinished {
 public:
  explicit Unfinished(TransportState<Abi>& state) : state_(&state) {
    state.unfinished.fetch_add(1, std::memory_order_relaxed);
  }
  ~Unfinished() { End(); }
  Unfinished(const Unfinished&) = delete;
  void End() {
    if (state_ != nullptr) state_->unfinished.fetch_sub(1, std::memory_order_relaxed);
    state_ = nullptr;
  }

 private:
  TransportState<Abi>* state_;
};

}  // namespace gradred::comm::mpi
