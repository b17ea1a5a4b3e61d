#include "engine/completions.h"

#include <exception>
#include <utility>

#include "base/log.h"
#include "base/timeline.h"

namespace gradred::engine {

namespace {

thread_local Completions::Scope* innermost = nullptr;
thread_local int callbacks_deep = 0;

void Call(const Completions::Callback& callback) {
  ++callbacks_deep;
  try {
    callback();
  } catch (const std::exception& e) {
    Log(LogLevel::kError, std::string("a completion callback threw: ") + e.what());
  }
  --callbacks_deep;
}

}  // namespace

Completions::Scope::Scope(Completions* completions)
    : completions_(completions), outer_(std::exchange(innermost, this)) {}

Completions::Scope::~Scope() {
  innermost = outer_;
  Run();
}

void Completions::Scope::Run() {
  while (!callbacks_.empty()) {
    const std::vector<Callback> callbacks = std::exchange(callbacks_, {});
    for (const Callback& callback : callbacks) Call(callback);
  }
}

void Completions::Scope::HandOver() {
  for (Callback& callback : callbacks_) completions_->Queue(std::move(callback));
  callbacks_.clear();
}

bool Completions::InCallback() { return callbacks_deep > 0; }

void Completions::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Completions::Post(Callback callback) {
  if (innermost != nullptr && innermost->completions_ == this)
    innermost->callbacks_.push_back(std::move(callback));
  else
    Queue(std::move(callback));
}

void Completions::Queue(Callback callback) {
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
    Callback callback = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Call(callback);
    callback = nullptr;  // what it holds is freed without the lock too
    lock.lock();
  }
}

}  // namespace gradred::engine
