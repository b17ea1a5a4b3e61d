// Monotonic time in integer nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace gradred {

using Nanos = int64_t;
constexpr Nanos kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr Nanos kForever = INT64_MAX;

inline Nanos Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace gradred
