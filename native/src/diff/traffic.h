// The transport of differentiable communication, shared by the threads of all contexts.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace gradred::diff {

// What a rank that has left a context had done there: so much the others can still finish.
struct Leaving {
  Status cause;
  int64_t finished = 0;            // collective operations
  int64_t sent = 0, received = 0;  // messages of Channel, to and from the rank that is told
};

// What was told of a context.
struct News {
  Status failure;                      // the first, which ends it
  std::map<int, Leaving> left;         // by rank of the transport
  std::map<int, std::string> waiting;  // who waits while nothing moves, and in what
};

// Note [Who looks after the transport]
// A transport is used by one thread at a time, and each context has a thread of its own: else two
// contexts that come to their operations in different orders on two ranks would block each other.
// So whatever uses the transport holds this object's lock, for as long as a poll takes. Of the
// threads that wait, one sleeps on the transport's bell, without the lock; the others wait for it,
// and look for themselves when it has woken.
class Traffic {
 public:
  // `transport` is used through this object alone and outlives it.
  explicit Traffic(comm::Transport& transport) : transport_(transport) {}

  comm::Transport& transport() { return transport_; }  // with the lock held

  template <class Function>
  auto Locked(const Function& function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function();
  }

  // Until `finished`, which is called with the lock held and is to poll what it waits for, or until
  // `until` has passed: then false.
  bool WaitUntil(const std::function<bool()>& finished, Nanos until);

  // Tell `peers`, ranks of the transport. They do not wait.
  void TellFailure(int context, const Status& failure, const std::vector<int>& peers);
  void TellLeaving(int context, const Leaving& leaving, int peer);
  // `what`: see News; empty: it goes on.
  void TellWaiting(int context, const std::string& what, int peer);
  // Tells this rank, and wakes who waits. Any thread.
  void Note(int context, const Status& failure);
  // What was told of a context. With the lock held.
  const News& ToldOf(int context) { return news_[context]; }

  int64_t moved_nbytes() const { return transport_.moved_nbytes(); }

 private:
  void TakeNews();
  void Post(const std::vector<int>& peers, const std::string& bytes);
  void Fail(int context, const Status& failure);

  comm::Transport& transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool watched_ = false;  // somebody sleeps on the bell
  uint64_t looks_ = 0;    // counts when who sleeps there has woken
  int waiting_ = 0;       // others
  std::map<int, News> news_;
};

}  // namespace gradred::diff
