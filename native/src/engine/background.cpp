#include "engine/background.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/timeline.h"

namespace gradred::engine {
namespace {

constexpr int kNice = 10;

}  // namespace

void Background::Post(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  wake_.notify_one();
}

void Background::Stop() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  wake_.notify_one();
  if (thread.joinable()) thread.join();
}

void Background::Run() {
  timeline::NameThread(name_);
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNice);  // of this thread alone
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (stopping_) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const std::exception& e) {
      Log(LogLevel::kError, std::string("a task of the thread '") + name_ + "' threw: " + e.what());
    }
    task = nullptr;  // what it holds is freed without the lock
    lock.lock();
  }
}

}  // namespace gradred::engine
