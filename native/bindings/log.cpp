// Note [Log lines]
// The sink runs on native threads, some of which the holder of the GIL may be waiting for. So it
// never asks for the GIL: it fills a queue, and a Python thread (gradred/basics.py) takes lines
// from it until the queue is closed, before the interpreter ends.
#include "base/log.h"

#include <condition_variable>
#include <deque>
#include <mutex>

#include "bindings.h"

namespace gradred::bindings {
namespace {

constexpr size_t kMaxLines = 10000;  // a reader that stands still must not cost memory

class LogQueue {
 public:
  void Put(LogLevel level, const std::string& line) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (lines_.size() >= kMaxLines) {
        ++dropped_;
        return;
      }
      lines_.emplace_back(level, line);
    }
    changed_.notify_one();
  }

  void Close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

  // Waits for lines; none: closed.
  std::deque<std::pair<LogLevel, std::string>> Take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !lines_.empty(); });
    auto lines = std::move(lines_);
    lines_.clear();
    if (dropped_ > 0) {
      lines.emplace_back(LogLevel::kWarning, std::to_string(dropped_) + " log lines were dropped");
      dropped_ = 0;
    }
    return lines;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<LogLevel, std::string>> lines_;
  int64_t dropped_ = 0;
  bool closed_ = false;
};

LogQueue& TheQueue() {
  static LogQueue* queue = new LogQueue;  // outlives every thread
  return *queue;
}

}  // namespace

void BindLog(py::module_& m) {
  m.def("open_log", [] {
    SetLogSink([](LogLevel level, const std::string& line) { TheQueue().Put(level, line); });
  });
  m.def("close_log", [] {
    SetLogSink({});
    TheQueue().Close();
  });
  m.def("take_log_lines", [] {
    std::deque<std::pair<LogLevel, std::string>> lines;
    {
      py::gil_scoped_release release;
      lines = TheQueue().Take();
    }
    py::list result;
    // logging.DEBUG, INFO, WARNING, ERROR
    for (const auto& [level, line] : lines) {
      result.append(py::make_tuple(10 * (1 + static_cast<int>(level)), line));
    }
    return result;
  });
  m.def(
      "log",
      [](int level, const std::string& line) { Log(static_cast<LogLevel>(level / 10 - 1), line); },
      py::arg("level"), py::arg("line"));
}

}  // namespace gradred::bindings
