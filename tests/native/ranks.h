// Threads that play ranks.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

namespace testing {

// Runs body(rank) in `size` threads and throws one Failure with the text of every rank that failed.
// Every wait in `body` must have a deadline.
inline void RunRanks(int size, const std::function<void(int)>& body) {
  std::vector<std::string> failures(size);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        failures[r] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string text;
  for (int r = 0; r < size; ++r) {
    if (!failures[r].empty()) text += "\n  rank " + std::to_string(r) + ": " + failures[r];
  }
  if (!text.empty()) throw Failure(std::to_string(size) + " ranks:" + text);
}

}  // namespace testing
