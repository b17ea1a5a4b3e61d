// Transport over one duplicated communicator, by Isend, Irecv and Test alone: a point-to-point
// request can be left behind after a fault, a collective cannot.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi/mpi_datagrams.h"
#include "comm/mpi/mpi_reduce.h"
#include "comm/mpi/mpi_state.h"
#include "comm/mpi/self_messages.h"
#include "comm/transport.h"

namespace gradred::comm::mpi {

constexpr int64_t kMaxChunk = 1 << 30;  // bytes a call of MPI takes at most: its counts are ints

enum class Way { kSend, kReceive };

// Note [Sizes of messages]
// A message travels as chunks of `chunk` bytes and one last, shorter one, which may be empty: so
// the chunks of a message of any other size differ from what the receiver posted, in number or in
// the size of one of them, and the first chunk that differs is an error on the receiver. MPI itself
// reports only what is too long. Chunks of one message are all posted at once, in order, since the
// next message may have the same tag.
template <class Abi>
class MessageWork final : public Work {
 public:
  using State = TransportState<Abi>;

  // `rank` is for errors.
  MessageWork(std::shared_ptr<State> state, Way way, int rank, int peer, int tag, void* data,
              int64_t nbytes, int64_t chunk)
      : state_(std::move(state)),
        unfinished_(*state_),
        way_(way),
        rank_(rank),
        peer_(peer),
        tag_(tag),
        nbytes_(nbytes),
        chunk_(chunk) {
    Mpi<Abi>& mpi = *state_->mpi;
    requests_.reserve(static_cast<size_t>(nbytes / chunk + 1));
    for (int64_t at = 0; at <= nbytes; at += chunk) {
      const int count = static_cast<int>(std::min(chunk, nbytes - at));
      void* from = count > 0 ? static_cast<char*>(data) + at : data;
      auto& request = requests_.emplace_back(mpi.api.request_null);
      const int code = way == Way::kSend ? mpi.Try(mpi.api.Isend, from, count, mpi.api.byte, peer,
                                                   tag, state_->comm, &request)
                                         : mpi.Try(mpi.api.Irecv, from, count, mpi.api.byte, peer,
                                                   tag, state_->comm, &request);
      if (code != Abi::kSuccess) mpi.Check(code, Text());
    }
  }

 private:
  // Destroyed unfinished, it leaves its requests to MPI: the memory stays with the owner.
  bool Advance() override {
    try {
      state_->ThrowIfAborted();
      for (; next_ < requests_.size(); ++next_)
        if (!TestNext()) return false;
    } catch (...) {
      unfinished_.End();
      throw;
    }
    unfinished_.End();
    return true;
  }

  bool TestNext() {
    Mpi<Abi>& mpi = *state_->mpi;
    int flag = 0;
    typename Abi::Status status{};
    const int code = mpi.Try(mpi.api.Test, &requests_[next_], &flag, &status);
    if (code != Abi::kSuccess) {
      if (way_ == Way::kReceive && mpi.IsTruncation(code)) ThrowSize(status, code);
      mpi.Check(code, Text());
    }
    if (flag && way_ == Way::kReceive && CountOf(status) != Expected()) ThrowSize(status, code);
    if (flag) state_->moved_nbytes.fetch_add(Expected(), std::memory_order_relaxed);
    return flag != 0;
  }

  int64_t At() const { return static_cast<int64_t>(next_) * chunk_; }
  int64_t Expected() const { return std::min(chunk_, nbytes_ - At()); }

  int64_t CountOf(const typename Abi::Status& status) {
    int count = 0;
    state_->mpi->Call("MPI_Get_count", state_->mpi->api.Get_count, &status, state_->mpi->api.byte,
                      &count);
    return count;
  }

  // Of a message that was too long the status may not tell the size; then MPI's text may (MPICH).
  [[noreturn]] void ThrowSize(const typename Abi::Status& status, int code) {
    const int64_t count = CountOf(status);
    const std::string got = count == Expected() ? "more (" + state_->mpi->ErrorText(code) + ")"
                                                : std::to_string(At() + count) + " bytes";
    throw Error(Kind::kTransportError,
                Text() + ": expected " + std::to_string(nbytes_) + " bytes, got " + got);
  }

  std::string Text() const {
    const std::string peer = std::to_string(peer_), rank = std::to_string(rank_);
    return (way_ == Way::kSend ? "rank " + rank + ": MPI message to rank " + peer
                               : "rank " + rank + ": MPI message from rank " + peer) +
           ", tag " + std::to_string(tag_) + " (channel " + std::to_string(tag_ / kSequences) +
           ", sequence " + std::to_string(tag_ % kSequences) + ")";
  }

  const std::shared_ptr<State> state_;
  Unfinished<Abi> unfinished_;
  const Way way_;
  const int rank_, peer_, tag_;
  const int64_t nbytes_, chunk_;
  std::vector<typename Abi::Request> requests_;
  size_t next_ = 0;
};

template <class Abi>
class SelfWork final : public Work {
 public:
  SelfWork(std::shared_ptr<TransportState<Abi>> state, SelfMessagePtr message)
      : state_(std::move(state)), message_(std::move(message)) {}

 private:
  bool Advance() override {
    state_->ThrowIfAborted();
    ThrowIfError(message_->status);
    return message_->finished;
  }
  const std::shared_ptr<TransportState<Abi>> state_;
  const SelfMessagePtr message_;
};

// Finished, badly, when it is made: a call on an aborted transport.
class FailedWork final : public Work {
 public:
  explicit FailedWork(Status cause) : cause_(std::move(cause)) {}

 private:
  bool Advance() override { throw Error(cause_); }
  const Status cause_;
};

template <class Abi>
class MpiTransport final : public Transport {
 public:
  // `comm` is for this object and `datagrams` alone, and is freed by the fabric. `datagrams` may be
  // null: each look for one is a call of MPI. `chunk`: see Note [Sizes of messages].
  MpiTransport(std::shared_ptr<Mpi<Abi>> mpi, typename Abi::Comm comm,
               std::shared_ptr<Datagrams<Abi>> datagrams, int rank, int size,
               int64_t chunk = kMaxChunk)
      : state_(std::make_shared<TransportState<Abi>>()),
        datagrams_(std::move(datagrams)),
        rank_(rank),
        size_(size),
        chunk_(chunk) {
    state_->mpi = std::move(mpi);
    state_->comm = comm;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) override {
    // Both ways share code, and a send is never written to.
    return Start(Way::kSend, peer, tag, const_cast<void*>(data), nbytes);
  }
  WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) override {
    return Start(Way::kReceive, peer, tag, data, nbytes);
  }

  // Dropped after Abort.
  void Post(int peer, const std::string& bytes) override {
    CheckPeer(peer);
    if (static_cast<int64_t>(bytes.size()) > kMaxDatagram)
      throw Error(Kind::kInvalidArgument, "a datagram of " + std::to_string(bytes.size()) +
                                              " bytes, expected at most " +
                                              std::to_string(kMaxDatagram));
    if (datagrams_ == nullptr)
      throw Error(Kind::kInternal, "rank " + std::to_string(rank_) + ": a datagram to rank " +
                                       std::to_string(peer) + " on a transport without them");
    if (state_->aborted) return;
    datagrams_->Send(peer, bytes);
    if (peer == rank_) bell_.Ring();
  }

  // Nothing arrives after Abort.
  bool TakePosted(Message* message) override {
    return datagrams_ != nullptr && !state_->aborted && datagrams_->Take(message);
  }

  // Whatever is called, MPI moves all messages of the process.
  void Progress() override {
    if (datagrams_ != nullptr && !state_->aborted) datagrams_->Progress();
  }

  Doorbell& bell() override { return bell_; }
  Doorbell* BellOf(int) override { return nullptr; }

  int64_t moved_nbytes() const override {
    return state_->moved_nbytes.load(std::memory_order_relaxed);
  }

  bool MustPoll() const override {
    return state_->unfinished.load(std::memory_order_relaxed) > 0 ||
           (datagrams_ != nullptr && !datagrams_->idle());
  }

  void Abort(const Status& cause) override {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      if (!state_->aborted) state_->cause = cause;
      state_->aborted.store(true, std::memory_order_release);
    }
    bell_.Ring();
  }
  void ThrowIfAborted() override { state_->ThrowIfAborted(); }

  NativeReducePtr MakeNative(const std::vector<int>& members) override {
    return std::make_shared<MpiReduce<Abi>>(state_, members);
  }

 private:
  void CheckPeer(int peer) const {
    if (peer < 0 || peer >= size_)
      throw Error(Kind::kInvalidArgument, "peer " + std::to_string(peer) + " is none of the " +
                                              std::to_string(size_) + " ranks");
  }

  WorkPtr Start(Way way, int peer, Tag tag, void* data, int64_t nbytes) {
    CheckPeer(peer);
    if (nbytes < 0 || tag.channel >= kChannels || tag.sequence >= kSequences)
      throw Error(Kind::kInvalidArgument, "a message of " + std::to_string(nbytes) +
                                              " bytes, channel " + std::to_string(tag.channel) +
                                              ", sequence " + std::to_string(tag.sequence));
    const int number = tag.channel * kSequences + tag.sequence;
    try {
      state_->ThrowIfAborted();
      if (peer == rank_)
        return std::make_unique<SelfWork<Abi>>(state_, way == Way::kSend
                                                           ? self_.Send(number, data, nbytes)
                                                           : self_.Receive(number, data, nbytes));
      return std::make_unique<MessageWork<Abi>>(state_, way, rank_, peer, number, data, nbytes,
                                                chunk_);
    } catch (const Error& e) {
      return std::make_unique<FailedWork>(e.status());
    }
  }

  const std::shared_ptr<TransportState<Abi>> state_;
  const std::shared_ptr<Datagrams<Abi>> datagrams_;
  const int rank_, size_;
  const int64_t chunk_;
  SelfMessages self_;
  DoorbellWord bell_word_;
  Doorbell bell_{&bell_word_, false};
};

}  // namespace gradred::comm::mpi
