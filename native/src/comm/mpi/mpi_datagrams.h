// Datagrams of one communicator: the side channel. Kept by the fabric when its transport is gone,
// until all have arrived.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi/mpi_calls.h"
#include "comm/transport.h"

namespace gradred::comm::mpi {

constexpr int kPostTag = kChannels * kSequences;  // above all tags of messages

// Note [Datagrams that nobody has taken]
// A communicator must not be freed while messages to it are unmatched (MPICH ends the program), and
// how many there are nobody knows. So datagrams are synchronous sends, which finish when they are
// matched, and closing is the dynamic sparse data exchange of Hoefler, Siebert and Lumsdaine
// (doi:10.1145/1693453.1693476): receive what comes; when my own sends have finished, enter a
// nonblocking barrier; when that has finished, so have everybody's sends.
//
// They are probed for and then received, rather than awaited by receives from any source posted in
// advance: those would have to be cancelled at the end, and after a fault MPI could still write to
// each of their buffers.
template <class Abi>
class Datagrams {
 public:
  Datagrams(std::shared_ptr<Mpi<Abi>> mpi, typename Abi::Comm comm, int rank)
      : mpi_(std::move(mpi)), comm_(comm), rank_(rank) {}
  // No call of MPI. What is under way then (after a fault) MPI may still touch.
  ~Datagrams() {
    if (incoming_) sends_.push_back(std::move(*incoming_));
    for (Pending& send : sends_) Process::Get().Bury(std::move(send.bytes));
  }
  Datagrams(const Datagrams&) = delete;

  void Send(int peer, const std::string& bytes) {
    const auto& api = mpi_->api;
    if (peer == rank_) {
      inbox_.push_back({rank_, bytes});
      return;
    }
    Pending& send = sends_.emplace_back(Pending{api.request_null, {bytes.begin(), bytes.end()}});
    mpi_->Call("MPI_Issend of a datagram", api.Issend, send.bytes.data(),
               static_cast<int>(send.bytes.size()), api.byte, peer, kPostTag, comm_, &send.request);
  }

  void Progress() {
    for (auto send = sends_.begin(); send != sends_.end();)
      send = Test(&*send) ? sends_.erase(send) : std::next(send);
    if (!incoming_) Probe();
    if (!incoming_ || !Test(&*incoming_)) return;
    inbox_.push_back(
        {incoming_source_, std::string(incoming_->bytes.begin(), incoming_->bytes.end())});
    incoming_.reset();
  }

  bool Take(Message* message) {
    if (inbox_.empty()) Progress();
    if (inbox_.empty()) return false;
    *message = std::move(inbox_.front());
    inbox_.pop_front();
    return true;
  }

  // Nothing of ours is under way, as far as the last Progress saw.
  bool idle() const { return sends_.empty() && !incoming_; }

 private:
  struct Pending {
    typename Abi::Request request;
    std::vector<char> bytes;
  };

  bool Test(Pending* pending) {
    int flag = 0;
    mpi_->Call("MPI_Test of a datagram", mpi_->api.Test, &pending->request, &flag,
               mpi_->api.status_ignore);
    return flag != 0;
  }

  void Probe() {
    const auto& api = mpi_->api;
    int flag = 0, count = 0;
    typename Abi::Status status{};
    mpi_->Call("MPI_Iprobe", api.Iprobe, Abi::kAnySource, kPostTag, comm_, &flag, &status);
    if (!flag) return;
    mpi_->Call("MPI_Get_count", api.Get_count, &status, api.byte, &count);
    if (count < 0 || count > kMaxDatagram)
      throw Error(Kind::kTransportError, "rank " + std::to_string(rank_) + ": a datagram of " +
                                             std::to_string(count) + " bytes from rank " +
                                             std::to_string(status.source) + ", expected at most " +
                                             std::to_string(kMaxDatagram));
    incoming_source_ = status.source;
    incoming_.emplace(Pending{api.request_null, std::vector<char>(static_cast<size_t>(count))});
    mpi_->Call("MPI_Irecv of a datagram", api.Irecv, incoming_->bytes.data(), count, api.byte,
               status.source, kPostTag, comm_, &incoming_->request);
  }

  const std::shared_ptr<Mpi<Abi>> mpi_;
  const typename Abi::Comm comm_;
  const int rank_;
  std::list<Pending> sends_;
  std::optional<Pending> incoming_;  // seen and being received
  int incoming_source_ = -1;
  std::deque<Message> inbox_;
};

}  // namespace gradred::comm::mpi
