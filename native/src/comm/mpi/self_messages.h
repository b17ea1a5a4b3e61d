// Messages of a rank to itself, matched in memory. MPI could carry them, but Open MPI does not
// report one that is longer than its receive.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"

namespace gradred::comm::mpi {

// Half of a message, posted. Finished when its other half has come.
struct SelfMessage {
  const void* source = nullptr;  // of a send
  void* target = nullptr;        // of a receive
  int64_t nbytes = 0;
  bool finished = false;
  Status status;
};
using SelfMessagePtr = std::shared_ptr<SelfMessage>;

class SelfMessages {
 public:
  SelfMessagePtr Send(int tag, const void* data, int64_t nbytes) {
    auto send = std::make_shared<SelfMessage>();
    send->source = data;
    send->nbytes = nbytes;
    if (SelfMessagePtr receive = Take(&receives_, tag))
      Match(tag, send.get(), receive.get());
    else
      sends_[tag].push_back(send);
    return send;
  }

  SelfMessagePtr Receive(int tag, void* data, int64_t nbytes) {
    auto receive = std::make_shared<SelfMessage>();
    receive->target = data;
    receive->nbytes = nbytes;
    if (SelfMessagePtr send = Take(&sends_, tag))
      Match(tag, send.get(), receive.get());
    else
      receives_[tag].push_back(receive);
    return receive;
  }

 private:
  using Queues = std::map<int, std::deque<SelfMessagePtr>>;

  static SelfMessagePtr Take(Queues* queues, int tag) {
    const auto queue = queues->find(tag);
    if (queue == queues->end()) return nullptr;
    SelfMessagePtr first = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty()) queues->erase(queue);
    return first;
  }

  static void Match(int tag, SelfMessage* send, SelfMessage* receive) {
    send->finished = receive->finished = true;
    if (send->nbytes != receive->nbytes) {
      receive->status = Status(Kind::kTransportError,
                               "message of this rank to itself, tag " + std::to_string(tag) +
                                   ": expected " + std::to_string(receive->nbytes) +
                                   " bytes, got " + std::to_string(send->nbytes) + " bytes");
    } else if (send->nbytes > 0) {
      std::memcpy(receive->target, send->source, static_cast<size_t>(send->nbytes));
    }
  }

  Queues sends_, receives_;  // no empty queue is kept
};

}  // namespace gradred::comm::mpi
