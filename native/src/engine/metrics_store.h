// The engine's counters, written by its threads.
#pragma once

#include <mutex>

#include "base/clock.h"
#include "engine/engine.h"

namespace gradred::engine {

class MetricsStore {
 public:
  template <class Change>
  void Update(Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(values_);
  }
  Metrics Read() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_;
  }

 private:
  mutable std::mutex mutex_;
  Metrics values_;
};

inline double Seconds(Nanos t) { return static_cast<double>(t) * 1e-9; }

}  // namespace gradred::engine
