#include "engine/completions.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "base/timeline.h"

namespace gradred::engine {

namespace {

void Call(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const std::exception& e) {
    Log(LogLevel::kError, std::string("a completion callback threw: ") + e.what());
  }
}

}  // namespace

void Completions::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Completions::Post(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      queue_.push_back(std::move(callback));
      wake_.notify_one();
      return;
    }
  }
  Call(callback);
}

void Completions::Run() {
  timeline::NameThread("completions");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> callback = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Call(callback);
    callback = nullptr;  // what it holds is freed without the lock too
    lock.lock();
  }
}

}  // namespace gradred::engine
