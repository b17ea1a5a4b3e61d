// What a rank knows of a domain's plan, for people and files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/planner.h"
#include "engine/spec.h"

namespace gradred::engine {

// One domain's plan, as this rank sees it.
struct PlanReport {
  std::string domain;
  int process_set = 0;
  bool planned = false;
  std::vector<std::string> labels;  // by position
  std::vector<int64_t> counts;      // elements, by position
  std::vector<int64_t> nbytes;      // by position, on the wire
  ArrangementPtr arrangement;
  int64_t batches = 0;       // opened since init or the last join
  int64_t changes = 0;       // of the plan, after measurements
  std::vector<Nanos> ready;  // by position; empty: not measured
  core::Cuts predicted;      // empty: not planned yet
  std::vector<core::GroupTimes> measured;
  std::vector<int64_t> sizes;  // of the table of costs
  std::vector<Nanos> costs;
  Nanos round = 0;
};

}  // namespace gradred::engine
