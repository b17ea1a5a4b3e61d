// A thread that runs callbacks, so that no loop of the engine runs a user's code and no lock is
// held while it runs.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace gradred::engine {

class Completions {
 public:
  Completions() : thread_([this] { Run(); }) {}
  ~Completions() { Stop(); }
  void Post(std::function<void()> callback);
  // Runs what is queued and ends the thread; a later Post runs its callback at once, in the caller.
  // Not from a callback.
  void Stop();

 private:
  void Run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace gradred::engine
