// A Work written as a sequence of steps, each of which starts Works that the next one waits for.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/transport.h"

namespace gradred::comm {

class SteppedWork : public Work {
 protected:
  // Runs after everything that is awaited. A step that names no next one is the last.
  void Next(std::function<void()> step) { next_ = std::move(step); }
  void Await(std::shared_ptr<Work> work) { awaited_.push_back(std::move(work)); }

 private:
  bool Advance() final {
    while (true) {
      while (!awaited_.empty()) {
        if (!awaited_.back()->Poll()) return false;
        ThrowIfError(awaited_.back()->status());
        awaited_.pop_back();
      }
      if (!next_) return true;
      std::exchange(next_, nullptr)();
    }
  }

  std::vector<std::shared_ptr<Work>> awaited_;
  std::function<void()> next_;
};

}  // namespace gradred::comm
