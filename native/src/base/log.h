// Log lines leave through one sink, which the binding connects to Python's `logging`. Nothing is
// printed here.
#pragma once

#include <functional>
#include <string>

namespace gradred {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
using LogSink = std::function<void(LogLevel, const std::string&)>;

// Replaces the sink; an empty one drops lines. The sink is called on any thread, one call at a
// time.
void SetLogSink(LogSink sink);
void Log(LogLevel level, const std::string& line);

}  // namespace gradred
