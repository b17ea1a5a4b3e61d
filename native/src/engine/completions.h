// Runs callbacks where no lock is held and no loop of the engine is in anybody's hands: by the
// thread whose step caused them, afterwards, or on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace gradred::engine {

class Completions {
 public:
  using Callback = std::function<void()>;

  // Collects what this thread posts, and runs it when it ends, here. Scopes of one thread nest.
  class Scope {
   public:
    explicit Scope(Completions* completions);
    ~Scope();
    Scope(const Scope&) = delete;
    bool empty() const { return callbacks_.empty(); }
    void Run();
    void HandOver();  // to the thread of `completions`

   private:
    friend class Completions;
    Completions* const completions_;
    Scope* const outer_;
    std::vector<Callback> callbacks_;
  };

  Completions() : thread_([this] { Run(); }) {}
  ~Completions() { Stop(); }
  // To the innermost scope of this thread, if that is of this object; else to the thread.
  void Post(Callback callback);
  // Runs what is queued and ends the thread; a later Post runs its callback at once, in the caller.
  // Not from a callback.
  void Stop();

  // This thread is running a callback.
  static bool InCallback();

 private:
  void Queue(Callback callback);
  void Run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Callback> queue_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace gradred::engine
