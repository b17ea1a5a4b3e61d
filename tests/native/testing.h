// A test framework in a page: TEST(Name) { CHECK(...); CHECK_EQ(a, b); }. `main` runs the tests
// whose names contain argv[1].
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace testing {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}
struct Registrar {
  Registrar(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

// Thrown, so that a failure inside a thread that plays a rank can be carried to the test.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class A, class B>
void CheckEq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << file << ":" << line << ": " << text << ": " << a << " is not " << b;
  throw Failure(out.str());
}
inline void Check(bool ok, const std::string& text, const char* file, int line) {
  if (!ok) throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

// GRADRED_TEST_SEED, or one of this run: for random tests, which print it where they fail.
inline uint64_t Seed() {
  const char* given = std::getenv("GRADRED_TEST_SEED");
  static const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  return seed;
}

inline int Main(int argc, char** argv) {
  int failed = 0, passed = 0;
  for (const Test& test : Tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    try {
      test.run();
      ++passed;
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAILED %s\n  %s (GRADRED_TEST_SEED=%llu)\n", test.name, e.what(),
                  static_cast<unsigned long long>(Seed()));
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace testing

#define TEST(Name)                                                     \
  static void Test##Name();                                            \
  static const testing::Registrar kRegister##Name(#Name, &Test##Name); \
  static void Test##Name()
#define CHECK(condition) testing::Check(bool(condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(a, b) testing::CheckEq((a), (b), #a " == " #b, __FILE__, __LINE__)
// The expression throws Error of this kind, and its message contains `part`.
#define CHECK_ERROR(expression, error_kind, part)                                               \
  do {                                                                                          \
    bool thrown_ = false;                                                                       \
    try {                                                                                       \
      (void)(expression);                                                                       \
    } catch (const gradred::Error& e) {                                                         \
      thrown_ = true;                                                                           \
      CHECK_EQ(std::string(gradred::KindName(e.kind())), gradred::KindName(error_kind));        \
      testing::Check(std::string(e.what()).find(part) != std::string::npos, e.what(), __FILE__, \
                     __LINE__);                                                                 \
    }                                                                                           \
    testing::Check(thrown_, #expression " throws", __FILE__, __LINE__);                         \
  } while (false)
