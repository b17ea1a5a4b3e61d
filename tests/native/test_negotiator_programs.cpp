// Property test of programs. Arguments: [part of a test's name [programs a test [first seed]]].
#include <cstdlib>

#include "protocol_runner.h"

namespace protocol {
namespace {

int g_programs = 400;
uint64_t g_first_seed = 1;

Outcome RunMany(const ProgramOptions& options) {
  Outcome sum;
  for (int i = 0; i < g_programs; ++i) {
    const uint64_t seed = g_first_seed + static_cast<uint64_t>(i);
    try {
      const Outcome one = RunRandomProgram(seed, options);
      sum.rounds += one.rounds;
      sum.empty_rounds += one.empty_rounds;
      sum.fallbacks += one.fallbacks;
      sum.runs += one.runs;
      sum.failed += one.failed;
      sum.unions += one.unions;
    } catch (const std::exception& e) {
      throw testing::Failure("seed " + std::to_string(seed) + ": " + e.what());
    }
  }
  return sum;
}

TEST(ProgramsWithoutWaitsNeedNoTimer) {
  ProgramOptions options;
  options.waits = options.timer = false;
  CHECK_EQ(RunMany(options).failed, 0);
  options.joins = true;
  CHECK_EQ(RunMany(options).failed, 0);
  options.abandons = options.mismatches = options.early_shutdown = options.two_sets = true;
  CHECK_EQ(RunMany(options).fallbacks,
           0);  // that empty rounds are no more than others is checked for each
}

TEST(ProgramsThatWait) {
  const Outcome sum = RunMany({});
  CHECK(sum.runs > 0 && sum.fallbacks > 0);
  CHECK_EQ(sum.failed, 0);
}

TEST(ProgramsOnTwoSets) {
  ProgramOptions options;
  options.two_sets = true;
  CHECK_EQ(RunMany(options).failed, 0);
}

TEST(ProgramsThatJoin) {
  ProgramOptions options;
  options.joins = true;
  CHECK_EQ(RunMany(options).failed, 0);
  options.two_sets = true;
  CHECK_EQ(RunMany(options).failed, 0);
}

TEST(ProgramsThatResign) {
  ProgramOptions options;
  options.resigns = true;
  const Outcome sum = RunMany(options);
  CHECK_EQ(sum.failed, 0);
  CHECK(sum.unions > 0);
}

TEST(ProgramsThatAbandon) {
  ProgramOptions options;
  options.abandons = true;
  CHECK(RunMany(options).failed > 0);
}

TEST(ProgramsThatMismatch) {
  ProgramOptions options;
  options.mismatches = options.resigns = true;
  CHECK(RunMany(options).failed > 0);
}

TEST(ProgramsThatShutDownEarly) {
  ProgramOptions options;
  options.early_shutdown = true;
  CHECK(RunMany(options).failed > 0);
}

TEST(ProgramsWhoseNamesRetire) {
  ProgramOptions options;
  options.retires = options.abandons = options.resigns = true;
  RunMany(options);
}

TEST(ProgramsThatDoEverything) {
  ProgramOptions options;
  options.two_sets = options.joins = options.abandons = options.resigns = true;
  options.mismatches = options.early_shutdown = options.retires = true;
  RunMany(options);
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) {
  if (argc > 2) protocol::g_programs = std::atoi(argv[2]);
  if (argc > 3) protocol::g_first_seed = std::strtoull(argv[3], nullptr, 10);
  return testing::Main(argc, argv);
}
