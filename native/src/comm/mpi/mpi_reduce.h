// MPI_Iallreduce. Only where results may depend on sizes: MPI chooses the order of sums. Neither
// can it be left behind as a message can, so after a fault its memory is never freed.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "comm/mpi/mpi_state.h"
#include "comm/native_reduce.h"

namespace gradred::comm::mpi {

// A call for each section, or several; finished when all are.
template <class Abi>
class ReduceWork final : public Work {
 public:
  struct Call {
    char* data;
    int count;
    typename Abi::Datatype type;
    typename Abi::Op op;
    int64_t nbytes;
  };

  ReduceWork(std::shared_ptr<TransportState<Abi>> state, typename Abi::Comm comm,
             std::vector<Call> calls)
      : state_(std::move(state)), unfinished_(*state_), calls_(std::move(calls)) {
    Mpi<Abi>& mpi = *state_->mpi;
    requests_.reserve(calls_.size());
    for (const Call& call : calls_) {
      auto& request = requests_.emplace_back(mpi.api.request_null);
      mpi.Call("MPI_Iallreduce", mpi.api.Iallreduce, mpi.api.in_place, call.data, call.count,
               call.type, call.op, comm, &request);
    }
  }

 private:
  bool Advance() override {
    state_->ThrowIfAborted();
    Mpi<Abi>& mpi = *state_->mpi;
    for (; next_ < requests_.size(); ++next_) {
      int finished = 0;
      mpi.Call("MPI_Test of an allreduce", mpi.api.Test, &requests_[next_], &finished,
               mpi.api.status_ignore);
      if (!finished) return false;
      state_->moved_nbytes.fetch_add(calls_[next_].nbytes, std::memory_order_relaxed);
    }
    unfinished_.End();
    return true;
  }

  const std::shared_ptr<TransportState<Abi>> state_;
  Unfinished<Abi> unfinished_;
  const std::vector<Call> calls_;
  std::vector<typename Abi::Request> requests_;
  size_t next_ = 0;
};

template <class Abi>
class MpiReduce final : public NativeReduce {
 public:
  // Collective over `members`, ranks of the transport whose state this is.
  MpiReduce(std::shared_ptr<TransportState<Abi>> state, const std::vector<int>& members)
      : state_(std::move(state)), comm_(state_->mpi->api.comm_null) {
    Mpi<Abi>& mpi = *state_->mpi;
    typename Abi::Group all, some;
    mpi.Call("MPI_Comm_group", mpi.api.Comm_group, state_->comm, &all);
    mpi.Call("MPI_Group_incl", mpi.api.Group_incl, all, static_cast<int>(members.size()),
             members.data(), &some);
    mpi.Call("MPI_Comm_create_group", mpi.api.Comm_create_group, state_->comm, some, 0, &comm_);
    mpi.Call("MPI_Group_free", mpi.api.Group_free, &some);
    mpi.Call("MPI_Group_free", mpi.api.Group_free, &all);
    mpi.Call("MPI_Comm_set_errhandler", mpi.api.Comm_set_errhandler, comm_, mpi.api.errors_return);
  }
  // Collective; after an abort the communicator stays.
  ~MpiReduce() override {
    if (!state_->aborted && !Process::Get().over())
      state_->mpi->Try(state_->mpi->api.Comm_free, &comm_);
  }

  bool Knows(const reduce::Layout& layout) const override {
    const auto& sections = layout.sections();
    return std::none_of(sections.begin(), sections.end(), [](const reduce::Section& s) {
      return IsHalf(s.dtype) || s.op == reduce::ReduceOp::kBitAnd;
    });
  }

  WorkPtr AllReduce(void* data, const reduce::Layout& layout) override {
    std::vector<typename ReduceWork<Abi>::Call> calls;
    for (const reduce::Section& s : layout.sections()) {
      const int64_t size = DTypeSize(s.dtype), end = s.offset + s.count * size;
      for (int64_t at = s.offset; at < end; at += kPiece) {
        const int64_t nbytes = std::min(kPiece, end - at);
        calls.push_back({static_cast<char*>(data) + at, static_cast<int>(nbytes / size),
                         TypeOf(s.dtype), OpOf(s), nbytes});
      }
    }
    return std::make_unique<ReduceWork<Abi>>(state_, comm_, std::move(calls));
  }

 private:
  static constexpr int64_t kPiece = 16 << 20;  // so that a long one is seen to move

  typename Abi::Datatype TypeOf(DType dtype) const {
    const Api<Abi>& api = state_->mpi->api;
    switch (dtype) {
      case DType::kUint16:
        return api.uint16;
      case DType::kUint32:
        return api.uint32;
      case DType::kUint64:
        return api.uint64;
      case DType::kInt8:
        return api.int8;
      case DType::kInt16:
        return api.int16;
      case DType::kInt32:
        return api.int32;
      case DType::kInt64:
        return api.int64;
      case DType::kFloat32:
        return api.float32;
      case DType::kFloat64:
        return api.float64;
      default:
        return api.uint8;  // bool too: 0 or 1
    }
  }

  typename Abi::Op OpOf(const reduce::Section& s) const {
    const Api<Abi>& api = state_->mpi->api;
    const bool logical = s.dtype == DType::kBool;
    switch (s.op) {
      case reduce::ReduceOp::kMin:
        return api.min;
      case reduce::ReduceOp::kMax:
        return api.max;
      case reduce::ReduceOp::kProduct:
        return logical ? api.min : api.product;
      default:
        return logical ? api.max : api.sum;
    }
  }

  const std::shared_ptr<TransportState<Abi>> state_;
  typename Abi::Comm comm_;
};

}  // namespace gradred::comm::mpi
