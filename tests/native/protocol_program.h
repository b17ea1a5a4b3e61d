// Random programs over simulated ranks, and a run of one that checks what the protocol promises. A program is a list of batches in an
// order that all ranks could follow; each rank submits groups when the results it waits for have arrived, which are of
// earlier batches (or earlier groups of the same one): so a valid schedule exists.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace protocol {

struct ProgramOptions {
  int max_ranks = 16;
  bool waits = true;       // submissions wait for results; off: each domain has one batch
  bool timer = true;       // rule 4
  bool two_sets = false;   // the second one has a part of the ranks
  bool joins = false;
  bool abandons = false;
  bool resigns = false;    // shapes and cuts of a domain change from batch to batch
  bool mismatches = false;
  bool early_shutdown = false;
  bool retires = false;    // after a few rounds
};

struct Outcome {
  int64_t rounds = 0, empty_rounds = 0, fallbacks = 0, runs = 0, failed = 0, unions = 0;
};

// Throws testing::Failure where a promise is broken.
Outcome RunRandomProgram(uint64_t seed, const ProgramOptions& options);

}  // namespace protocol
