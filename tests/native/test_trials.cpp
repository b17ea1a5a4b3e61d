// Which of the plans that are tried stays, with times that the test makes up.
#include <algorithm>
#include <functional>
#include <map>

#include "engine/measured.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;

namespace {

constexpr int64_t kMB = 1 << 20;
constexpr Nanos kMs = 1000000;

// Twelve entries of 1 MiB, ready one after the other; a group costs 0.1 ms and 0.1 ms a MiB.
class Machine {
 public:
  using End = std::function<Nanos(const Arrangement&, int times)>;  // times: tried before

  explicit Machine(End end) : end_(std::move(end)) {
    Arrangement listed;
    for (int i = 0; i < 12; ++i) {
      listed.order.push_back(i);
      nbytes_.push_back(kMB);
      measured_.ready.push_back((i + 1) * kMs);
    }
    listed.group_ends = {12};
    current_ = std::make_shared<Arrangement>(listed);
    for (const int64_t size : sizes_) measured_.costs.push_back(kMs / 10 + size * kMs / 10 / kMB);
  }

  // One exchange; the batches that the ranks then run before the next one.
  int Exchange() {
    measured_.end = end_(*current_, tries_[current_->group_ends]++);
    const Trials::Next next =
        trials_.OnMeasured(measured_, current_, nbytes_, sizes_, SpareCore::kYes);
    current_ = next.arrangement;
    return next.rest;
  }
  // Until a plan stays: how many exchanges that took.
  int Settle() {
    for (int exchanges = 1; exchanges < 30; ++exchanges)
      if (Exchange() > 0) return exchanges;
    CHECK(false);
    return 0;
  }
  size_t groups() const { return current_->group_ends.size(); }
  int tries(const std::vector<int>& group_ends) { return tries_[group_ends]; }
  size_t tried() const { return tries_.size(); }

 private:
  const End end_;
  const std::vector<int64_t> sizes_ = {4096, kMB, 16 * kMB};
  std::vector<int64_t> nbytes_;
  Measured measured_;
  Trials trials_;
  ArrangementPtr current_;
  std::map<std::vector<int>, int> tries_;
};

const std::vector<int> kOneMiB = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
const std::vector<int> kFourMiB = {4, 8, 12};

}  // namespace

TEST(TheFastestStays) {
  Machine small([](const Arrangement& a, int) { return Nanos(100 - a.group_ends.size()) * kMs; });
  small.Settle();
  CHECK_EQ(small.groups(), size_t(12));
  Machine large(
      [](const Arrangement& a, int) { return Nanos(100 + 9 * a.group_ends.size()) * kMs; });
  large.Settle();
  CHECK_EQ(large.groups(), size_t(1));
  Machine plain([](const Arrangement& a, int) { return a.group_ends == kFourMiB ? kMs : 2 * kMs; });
  plain.Settle();
  CHECK_EQ(plain.groups(), size_t(3));
  CHECK_EQ(plain.tries(kFourMiB), 1);  // nothing came near: no second time
}

TEST(FewerGroupsOnLessThanOnePercent) {
  Machine machine([](const Arrangement& a, int) {
    return a.group_ends == kOneMiB    ? 1000 * kMs
           : a.group_ends == kFourMiB ? 1009 * kMs
                                      : 2000 * kMs;
  });
  machine.Settle();
  CHECK_EQ(machine.groups(), size_t(3));
}

TEST(CloseOnesAreTriedAgain) {
  // The fastest is disturbed at its first time.
  Machine machine([](const Arrangement& a, int times) {
    if (a.group_ends == kOneMiB) return (times == 0 ? 1040 : 900) * kMs;
    return a.group_ends == kFourMiB ? 1000 * kMs : 2000 * kMs;
  });
  machine.Settle();
  CHECK_EQ(machine.groups(), size_t(12));
  CHECK_EQ(machine.tries(kOneMiB), 2);
  CHECK_EQ(machine.tries(kFourMiB), 2);
}

TEST(LooksAgainAndStartsAnew) {
  Nanos slower = 0;
  Machine machine([&slower](const Arrangement& a, int) {
    return Nanos(100 + a.group_ends.size()) * kMs + slower;
  });
  const int first = machine.Settle();
  CHECK(first >= 4 && first <= 12);
  int rest = 100;
  for (int i = 0; i < 8; ++i) {
    rest = std::min(2 * rest, 3200);
    CHECK_EQ(machine.Exchange(), rest);
    CHECK_EQ(machine.groups(), size_t(1));
  }
  slower = 50 * kMs;
  CHECK_EQ(machine.Exchange(), 0);
  CHECK(machine.Settle() >= 3);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
