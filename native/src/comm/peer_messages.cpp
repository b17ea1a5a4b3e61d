#include "comm/peer_messages.h"

#include <cstring>
#include <string>

namespace gradred::comm {

PeerMessages::~PeerMessages() {
  for (Pair& pair : messages_) {
    if (pair.send != nullptr) pair.out.BuryIt();
    if (pair.receive != nullptr) pair.in.BuryIt();
  }
}

int PeerMessages::Add(int peer, int64_t send_nbytes, int64_t receive_nbytes) {
  Pair pair{peer, send_nbytes, receive_nbytes, {}, {}, nullptr, nullptr};
  pair.out = BufferPool::Take(pool_, send_nbytes);
  pair.in = BufferPool::Take(pool_, receive_nbytes);
  messages_.push_back(std::move(pair));
  return static_cast<int>(messages_.size()) - 1;
}

void PeerMessages::Start() {
  for (Pair& pair : messages_) {
    if (pair.peer == transport_.rank()) {
      if (pair.send_nbytes != pair.receive_nbytes) {
        throw Error(Kind::kInternal, "rank " + std::to_string(pair.peer) +
                                         ": a message to itself: expected " +
                                         std::to_string(pair.receive_nbytes) + " bytes, got " +
                                         std::to_string(pair.send_nbytes));
      }
      if (pair.send_nbytes > 0) std::memcpy(pair.in.data(), pair.out.data(), pair.send_nbytes);
    } else if (pair.receive_nbytes > 0) {
      pair.receive = transport_.Recv(pair.peer, tag_, pair.in.data(), pair.receive_nbytes);
    }
  }
  for (Pair& pair : messages_) {
    if (pair.peer != transport_.rank() && pair.send_nbytes > 0)
      pair.send = transport_.Send(pair.peer, tag_, pair.out.data(), pair.send_nbytes);
  }
}

bool PeerMessages::Advance() {
  bool finished = true;
  const auto look = [&](WorkPtr* work) {
    if (*work == nullptr) return;
    if (!(*work)->Poll()) {
      finished = false;
    } else {
      ThrowIfError((*work)->status());
      work->reset();
    }
  };
  for (Pair& pair : messages_) {
    look(&pair.receive);
    look(&pair.send);
  }
  return finished;
}

}  // namespace gradred::comm
