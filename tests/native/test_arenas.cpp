// The memory of slots: which ranges are free, and when arenas come and go.
#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "comm/host_segment.h"
#include "engine/arenas.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;

namespace {

constexpr int64_t kKib = 1 << 10, kMib = 1 << 20;

// With an arena more where there is none with room, as Slots does it.
Arenas::Range TakeOrGrow(Arenas* arenas, int64_t nbytes) {
  const Arenas::Range range = arenas->Take(nbytes);
  const int64_t more = arenas->NextNbytes(nbytes);
  if (range.segment != nullptr || more == 0) return range;
  arenas->Add(comm::MakeHostSegment(more));
  return arenas->Take(nbytes);
}

}  // namespace

TEST(RangesAreTheFirstThatFit) {
  FreeRanges free(100);
  CHECK(free.all());
  CHECK_EQ(free.Take(101), -1);
  CHECK_EQ(free.Take(40), 0);
  CHECK_EQ(free.Take(40), 40);
  CHECK_EQ(free.Take(40), -1);
  CHECK_EQ(free.Take(20), 80);
  CHECK_EQ(free.Take(1), -1);
  free.Give(0, 40);
  free.Give(80, 20);
  CHECK_EQ(free.Take(41), -1);  // they do not touch
  CHECK_EQ(free.Take(10), 0);
  free.Give(40, 40);
  CHECK_EQ(free.Take(90), 10);
  free.Give(0, 10);
  CHECK(!free.all());
  free.Give(10, 90);
  CHECK(free.all());
}

// Against a list of bytes.
TEST(AnyOrderOfTakingAndGiving) {
  std::mt19937_64 random(testing::Seed());
  constexpr int kNbytes = 300;
  for (int round = 0; round < 200; ++round) {
    FreeRanges free(kNbytes);
    std::vector<char> taken(kNbytes, 0);
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (int step = 0; step < 200; ++step) {
      if (random() % 2 != 0 && !ranges.empty()) {
        std::swap(ranges[random() % ranges.size()], ranges.back());
        const auto [begin, nbytes] = ranges.back();
        ranges.pop_back();
        free.Give(begin, nbytes);
        std::fill_n(taken.begin() + begin, nbytes, 0);
      } else {
        const int64_t nbytes = 1 + static_cast<int64_t>(random() % 60);
        const std::vector<char> zeros(static_cast<size_t>(nbytes), 0);
        const auto at = std::search(taken.begin(), taken.end(), zeros.begin(), zeros.end());
        const int64_t begin = free.Take(nbytes);
        CHECK_EQ(begin, at == taken.end() ? -1 : at - taken.begin());
        if (begin < 0) continue;
        std::fill_n(taken.begin() + begin, nbytes, 1);
        ranges.emplace_back(begin, nbytes);
      }
      CHECK_EQ(free.all(), ranges.empty());
    }
  }
}

TEST(ArenasDoubleUpToTheBudget) {
  Arenas arenas(64 * kMib);
  CHECK(arenas.Take(1).segment == nullptr);
  std::vector<Arenas::Range> ranges;
  for (int i = 0; i < 100'000; ++i) {
    const Arenas::Range range = TakeOrGrow(&arenas, 100);
    CHECK_EQ(range.nbytes, Arenas::kApart);
    CHECK_EQ(range.offset % Arenas::kApart, 0);
    CHECK(range.offset + range.nbytes <= range.segment->nbytes());
    ranges.push_back(range);
    if (i == 0) CHECK_EQ(arenas.nbytes(), 16 * kKib);
    CHECK(arenas.nbytes() <= std::max(16 * kKib, 4 * Arenas::kApart * (i + 1)));
  }
  CHECK_EQ(arenas.nbytes(), 16 * kMib);
  CHECK_EQ(arenas.size(), 11U);
  // What is left of the last one, and two more.
  while (true) {
    const Arenas::Range range = TakeOrGrow(&arenas, kMib - 3);
    if (range.segment == nullptr) break;
    CHECK_EQ(range.nbytes, kMib);
    ranges.push_back(range);
  }
  CHECK_EQ(arenas.nbytes(), 64 * kMib);
  CHECK_EQ(arenas.size(), 13U);
  CHECK_EQ(ranges.size(), 100'000U + 3 + 48);
  for (const Arenas::Range& range : ranges) arenas.Give(range);
  CHECK_EQ(arenas.nbytes(), 0);
  CHECK_EQ(arenas.size(), 0U);
}

TEST(LargeRangesHaveArenasOfTheirSize) {
  Arenas arenas(10 * kMib);
  CHECK_EQ(arenas.NextNbytes(10 * kMib + 1), 0);
  const Arenas::Range large = TakeOrGrow(&arenas, 4 * kMib + 1);
  CHECK_EQ(arenas.nbytes(), 4 * kMib + 4 * kKib);
  CHECK_EQ(arenas.NextNbytes(1), 4 * kMib + 4 * kKib);
  CHECK_EQ(arenas.NextNbytes(5 * kMib), 5 * kMib);
  CHECK_EQ(arenas.NextNbytes(6 * kMib), 0);
  const Arenas::Range small = TakeOrGrow(&arenas, 1);  // what is left of the first
  CHECK(small.segment == large.segment);
  CHECK_EQ(small.offset, large.nbytes);
  arenas.GrowNoMore();
  CHECK_EQ(arenas.NextNbytes(1), 0);
  CHECK(TakeOrGrow(&arenas, 64 * kKib).segment == nullptr);
  arenas.Give(large);
  CHECK(TakeOrGrow(&arenas, 4 * kMib).segment == large.segment);
  arenas.Give(small);
  CHECK_EQ(arenas.size(), 1U);
}

// Every range keeps what was written to it until it is given back.
TEST(RangesAreApart) {
  std::mt19937_64 random(testing::Seed());
  Arenas arenas(kMib);
  struct Taken {
    Arenas::Range range;
    char mark;
  };
  std::vector<Taken> taken;
  const auto bytes = [](const Arenas::Range& range) {
    return static_cast<char*>(range.segment->data()) + range.offset;
  };
  const auto give = [&](size_t i) {
    std::swap(taken[i], taken.back());
    const auto [range, mark] = taken.back();
    taken.pop_back();
    CHECK_EQ(std::count(bytes(range), bytes(range) + range.nbytes, mark), range.nbytes);
    arenas.Give(range);
  };
  int64_t most = 0;
  for (int step = 0; step < 5000; ++step) {
    const bool fill = step / 500 % 2 == 0;
    if (random() % 4 < (fill ? 1U : 3U) && !taken.empty()) {
      give(random() % taken.size());
      continue;
    }
    const Arenas::Range range = TakeOrGrow(&arenas, 1 + static_cast<int64_t>(random() % 20'000));
    if (range.segment == nullptr) continue;
    const char mark = static_cast<char>(random());
    std::fill_n(bytes(range), range.nbytes, mark);
    taken.push_back({range, mark});
    most = std::max(most, arenas.nbytes());
  }
  CHECK_EQ(most, kMib);
  while (!taken.empty()) give(taken.size() - 1);
  CHECK_EQ(arenas.size(), 0U);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
