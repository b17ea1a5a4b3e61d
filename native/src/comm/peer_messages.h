// One message to and one from each of some peers, all under way together, in buffers of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/transport.h"

namespace gradred::comm {

// Use: Add() for each peer, write to sent(), Start(), and when Poll() is true read received(). The
// peers name the same sizes. A message to oneself is copied. Messages of no bytes are left out:
// both sides know. No other Work of these ranks may use `tag` meanwhile, except for an earlier
// PeerMessages that started earlier on all of them.
class PeerMessages : public Work {
 public:
  PeerMessages(Transport& transport, Tag tag, std::shared_ptr<BufferPool> pool)
      : transport_(transport), tag_(tag), pool_(std::move(pool)) {}
  // After a failure the outside library may write to the buffers as long as the process lives.
  ~PeerMessages() override;

  // `peer`: rank of the transport. Returns the number of the message: 0, 1, ...
  int Add(int peer, int64_t send_nbytes, int64_t receive_nbytes);
  char* sent(int message) { return messages_[message].out.data(); }
  const char* received(int message) const { return messages_[message].in.data(); }
  void Start();

 private:
  struct Pair {
    int peer;
    int64_t send_nbytes, receive_nbytes;
    BufferPool::Buffer out, in;
    WorkPtr send, receive;  // null: none, or finished well
  };
  bool Advance() override;

  Transport& transport_;
  const Tag tag_;
  const std::shared_ptr<BufferPool> pool_;
  std::vector<Pair> messages_;
};

}  // namespace gradred::comm
