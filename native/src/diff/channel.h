// What an operation communicates through: the ranks of a context, and calls that wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/world.h"
#include "diff/traffic.h"

namespace gradred::diff {

struct Limits {
  Nanos stall_warn = 60 * kSecond;  // a line in the log about who waits; 0: never
  Nanos stall_fail = 0;             // the wait fails; 0: never
  // All ranks of the context wait and nothing moves. A rank that computes in an operation, be it
  // for hours, is not waited for in this sense.
  Nanos transport_timeout = 30 * kSecond;
};

// Used by the worker of its context alone. Ranks are those of the context. Each call throws the
// first cause that ended the context or the job. What fails in the middle of an operation ends the
// context, on all its ranks.
//
// Memory of messages must outlive a failure: it is that of the call's inputs and outputs, or
// Scratch, never an operation's own.
class Channel {
 public:
  // `members`: world ranks, ascending.
  Channel(comm::World& world, std::shared_ptr<Traffic> traffic, int id, std::string name,
          std::vector<int> members, const Limits& limits);
  ~Channel();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& members() const { return members_; }  // world ranks

  // --- Collectives: all ranks of the context call them, in one order ---
  void AllReduce(comm::LayoutPtr layout, comm::CargoPtr cargo);
  void AllGather(const void* mine, void* all, std::vector<int64_t> nbytes);
  void Broadcast(void* data, int64_t nbytes, int root);
  void AllToAll(const void* in, std::vector<int64_t> send, void* out, std::vector<int64_t> recv);
  void Barrier();
  void Union(std::string* blob, comm::MergeFunction merge);

  // --- Messages ---
  // Start one; those of a pair of ranks match in the order of their calls. Sizes must agree. None
  // to or from rank -1.
  void Send(int peer, const void* data, int64_t nbytes);
  void Recv(int peer, void* data, int64_t nbytes);
  // Until all that were started have finished.
  void WaitForMessages();

  // Until the operation's end; aligned to 64 bytes, any contents. Throws kUnsupported when there is
  // no memory.
  void* Scratch(int64_t nbytes);

  // Multiplies a sum of kAverage: see Communicator::average_residual.
  double average_residual() const;

  // See comm::World; made by the first call, of an operation that all ranks run.
  const std::string& MpiCommunicator();
  // What operations keep for as long as the channel lives: one object, made by who first needs it.
  std::shared_ptr<void>& kept() { return kept_; }

  // --- For the context ---
  // `what`: the operation, for messages. `place`: its number among the collective ones; -1: it is
  // none.
  void Begin(std::string what, int64_t place);
  // Frees scratch memory, or leaves it where something may still be written to it: then true.
  bool End();
  // This rank ends its part: tells the others what they can still finish. The last call.
  void TellLeaving(const Status& cause, int64_t finished);
  int64_t place() const { return place_; }

 private:
  struct Message {
    comm::WorkPtr work;
    int peer;
    bool sent;
    int64_t number;  // of those to, or from, this peer; from 1
  };

  void Start(int peer, bool sent, const std::function<comm::WorkPtr(int, comm::Tag)>& start);
  void Finish(const std::function<comm::WorkPtr()>& start);
  void Await(const std::function<bool()>& finished);
  Status CauseOfEnd(const News& news) const;
  int FirstPresent();
  std::string AllWaiting();
  [[noreturn]] void TimeOut(const std::string& text);
  std::string Who() const;

  comm::World& world_;
  const std::shared_ptr<Traffic> traffic_;
  const int id_;
  const std::string name_;
  const std::vector<int> members_;
  const Limits limits_;
  int rank_ = 0;
  std::unique_ptr<comm::Communicator> communicator_;
  std::vector<Message> messages_;
  std::vector<int64_t> sent_, received_;  // [rank], messages started so far; after TellLeaving:
                                          // those that have finished
  std::vector<comm::SegmentPtr> scratch_;
  std::optional<std::string> mpi_communicator_;
  std::shared_ptr<void> kept_;
  std::string what_;
  int64_t place_ = -1;
  bool pending_ = false;  // something was left unfinished
};

}  // namespace gradred::diff
