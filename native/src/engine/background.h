// A thread for what takes long and nobody waits for.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace gradred::engine {

// Runs tasks one after the other, with less priority than the program's threads. The thread starts
// with the first task.
class Background {
 public:
  explicit Background(const char* name) : name_(name) {}
  ~Background() { Stop(); }
  Background(const Background&) = delete;

  void Post(std::function<void()> task);
  // Waits for the running task; the others, and later ones, are dropped.
  void Stop();

 private:
  void Run();

  const char* const name_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace gradred::engine
