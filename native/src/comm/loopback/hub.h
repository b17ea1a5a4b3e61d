// Threads of one process as ranks: the reference transport, for tests and for running alone.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace gradred::comm {

// What the ranks of one traffic share: a mailbox a rank.
class LoopbackHub : public std::enable_shared_from_this<LoopbackHub> {
 public:
  // A message on its way; datagrams have no tag.
  struct Letter {
    int source = -1;
    bool datagram = false;
    Tag tag;
    std::string bytes;
  };

  explicit LoopbackHub(int size);
  int size() const { return static_cast<int>(boxes_.size()); }

  // One a rank. The transport may outlive the caller's reference to the hub.
  std::unique_ptr<Transport> MakeTransport(int rank);

  // Any thread. From now on nothing comes from or to this rank.
  void Kill(int rank);

  // For the transports.
  void Deliver(int to, Letter letter);
  // Moves what has come to the end of *letters.
  void Collect(int rank, std::deque<Letter>* letters);
  DoorbellWord* bell_word(int rank) { return &boxes_[rank]->bell; }

 private:
  struct Box {
    DoorbellWord bell;
    std::atomic<bool> dead{false};
    std::atomic<bool> full{false};  // letters is not empty: spares pollers the lock
    std::mutex mutex;
    std::deque<Letter> letters;
  };
  std::vector<std::unique_ptr<Box>> boxes_;
};

}  // namespace gradred::comm
