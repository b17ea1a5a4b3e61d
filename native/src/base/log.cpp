#include "base/log.h"

#include <mutex>

namespace gradred {
namespace {

struct Sink {
  std::mutex mutex;
  LogSink function;
};
Sink& TheSink() {
  static Sink* sink = new Sink;  // outlives every thread
  return *sink;
}

}  // namespace

void SetLogSink(LogSink sink) {
  std::lock_guard<std::mutex> lock(TheSink().mutex);
  TheSink().function = std::move(sink);
}

void Log(LogLevel level, const std::string& line) {
  std::lock_guard<std::mutex> lock(TheSink().mutex);
  if (TheSink().function) TheSink().function(level, line);
}

}  // namespace gradred
