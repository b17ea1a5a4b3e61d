// What an event of the timeline costs the thread that records it.
//   timeline FILE     where to record to; it is left there
#include "base/timeline.h"

#include <algorithm>
#include <cstdio>
#include <vector>

using namespace gradred;
using namespace gradred::timeline;

namespace {

constexpr int kRounds = 201, kEvents = 2000;

// Median over rounds, ns an event. Rounds are short and apart, so that no ring is full.
template <class Event>
double Cost(Event event) {
  std::vector<double> costs;
  for (int r = 0; r < kRounds; ++r) {
    const Nanos begin = Now();
    for (int i = 0; i < kEvents; ++i) event(i);
    costs.push_back(static_cast<double>(Now() - begin) / kEvents);
    if (Recording()) {
      const timespec pause{0, 5'000'000};
      nanosleep(&pause, nullptr);
    }
  }
  std::nth_element(costs.begin(), costs.begin() + kRounds / 2, costs.end());
  return costs[kRounds / 2];
}

void Instant(int i) {
  if (!Recording()) return;
  Record record;
  record.begin = Now();
  record.name = "instant";
  record.entry = i;
  Push(record);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: timeline FILE\n");
    return 2;
  }
  const double clock = Cost([](int) { Now(); });
  const double off = Cost([](int i) { Span span("span", i); });
  Options options;
  options.path = argv[1];
  options.origin = Now();
  Start(options);
  const double instant = Cost(Instant);
  const double span = Cost([](int i) { Span span("span", i); });
  Stop();
  std::printf(
      "{\"clock_ns\": %.2f, \"span_off_ns\": %.2f, \"instant_ns\": %.2f, \"span_ns\": %.2f}\n",
      clock, off, instant, span);
}
