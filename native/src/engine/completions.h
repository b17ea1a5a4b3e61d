// A thread that runs callbacks, so that no loop of the engine runs a user's code and no lock is held while it runs.
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
  // Runs what is queued, then ends.
  ~Completions();
  void Post(std::function<void()> callback);

 private:
  void Run();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace gradred::engine
