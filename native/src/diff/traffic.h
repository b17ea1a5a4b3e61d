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

// What a context's ranks tell each other, or this rank itself, of its end.
struct News {
  Status cause;
  // Of a rank that has left: the collective operations that it has finished, which the others
  // still can. -1: the context has failed.
  int64_t finished = -1;
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

  // The end of a context, told to `peers`, ranks of the transport. Does not wait.
  void Tell(int context, const News& news, const std::vector<int>& peers);
  // The same told to this rank; wakes who waits. Any thread.
  void Note(int context, const News& news);
  // What was told of a context: its first failure, else who left first; null: nothing. With the
  // lock held.
  const News* ToldOf(int context) const;

  int64_t moved_nbytes() const { return transport_.moved_nbytes(); }

 private:
  void TakeNews();
  void Keep(int context, const News& news);

  comm::Transport& transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool watched_ = false;  // somebody sleeps on the bell
  uint64_t looks_ = 0;    // counts when who sleeps there has woken
  int waiting_ = 0;       // others
  std::map<int, News> news_;
};

}  // namespace gradred::diff
