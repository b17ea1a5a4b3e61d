// A Cargo over bytes that holds its user to the contract, and a check that AllReduceCargo gives the
// bits of AllReduce.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "conformance_data.h"
#include "testing.h"

namespace testing {

class CheckedCargo final : public gradred::comm::Cargo {
 public:
  using Range = gradred::reduce::Range;
  using Copy = std::function<void(void*, const void*, size_t)>;

  static void CopyBytes(void* to, const void* from, size_t n) { std::memcpy(to, from, n); }
  // `write` and `read` move bytes to and from the communicator's memory.
  explicit CheckedCargo(std::vector<char> input, Copy write = CopyBytes, Copy read = CopyBytes)
      : write_(std::move(write)),
        read_(std::move(read)),
        input_(std::move(input)),
        output(input_.size()) {}

  void Pack(Range range, void* at) override {
    Check(range.begin == packed && Fits(range), "packed in ascending order", __FILE__, __LINE__);
    packed = range.end;
    largest = std::max(largest, packed - unpacked);
    write_(at, input_.data() + range.begin, static_cast<size_t>(range.nbytes()));
  }
  void Unpack(Range range, const void* at) override {
    Check(range.begin == unpacked && Fits(range) && range.end <= packed,
          "unpacked in ascending order, after it was packed", __FILE__, __LINE__);
    unpacked = range.end;
    read_(output.data() + range.begin, at, static_cast<size_t>(range.nbytes()));
  }
  bool whole() const {
    const auto nbytes = static_cast<int64_t>(input_.size());
    return packed == nbytes && unpacked == nbytes;
  }

 private:
  bool Fits(Range range) const {
    constexpr int64_t kAlign = gradred::reduce::kAlign;
    const auto nbytes = static_cast<int64_t>(input_.size());
    return range.begin % kAlign == 0 && range.begin < range.end && range.end <= nbytes &&
           (range.end % kAlign == 0 || range.end == nbytes);
  }
  const Copy write_, read_;
  const std::vector<char> input_;

 public:
  std::vector<char> output;
  int64_t packed = 0, unpacked = 0;
  int64_t largest = 0;  // packed and not yet unpacked
};

// Collective. Cargos of several sizes at once, with other works issued between them and polls in an
// order of each rank's own: the same bits as AllReduce of the same data.
inline void CheckCargos(gradred::comm::Communicator& c, uint64_t seed, const std::string& name) {
  using namespace gradred;  // NOLINT: a test header
  const std::string where = name + ", rank " + std::to_string(c.rank()) + " of " +
                            std::to_string(c.size()) + ", seed " + std::to_string(seed);
  const auto wait = [&](comm::Work& work, const std::string& what) {
    ThrowIfError(Wait(work, c.transport(), 60 * kSecond, where + ": " + what));
  };
  struct Case {
    comm::LayoutPtr layout;
    std::shared_ptr<CheckedCargo> cargo;
    comm::WorkPtr work, barrier;
    std::vector<char> expected;
  };
  std::vector<Case> cases;
  for (const int64_t count : {0, 1, 300, 3000, 40, 1001}) {
    Case one;
    const uint64_t s = seed * 100 + static_cast<uint64_t>(count);
    const bool mixed = count == 40 || count == 0;
    one.layout = mixed ? conformance::MixedLayout(count, s, true)
                       : conformance::FloatingLayout(count, s, true);
    auto input = mixed ? conformance::Inputs(*one.layout, s, c.rank(), 1)
                       : conformance::RoundedInputs(*one.layout, s, c.rank());
    const comm::SegmentPtr segment = c.Alloc(std::max(one.layout->nbytes(), reduce::kAlign));
    if (!input.empty()) std::memcpy(segment->data(), input.data(), input.size());
    wait(*c.AllReduce(*segment, 0, one.layout), "allreduce");
    const char* reduced = static_cast<const char*>(segment->data());
    one.expected.assign(reduced, reduced + one.layout->nbytes());
    one.cargo = std::make_shared<CheckedCargo>(std::move(input));
    cases.push_back(std::move(one));
  }
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(c.rank()));
  for (Case& one : cases) {
    one.work = c.AllReduceCargo(one.layout, one.cargo);
    if (random() % 2) cases[0].work->Poll();
    one.barrier = c.Barrier();
  }
  const Nanos start = Now();
  for (size_t left = 2 * cases.size(); left > 0;) {
    Check(Now() - start < 60 * kSecond, where + ": cargos finish in time", __FILE__, __LINE__);
    Case& one = cases[random() % cases.size()];
    comm::WorkPtr& work = random() % 2 ? one.work : one.barrier;
    if (!work || !work->Poll()) {
      std::this_thread::yield();
      continue;
    }
    ThrowIfError(work->status());
    work.reset();
    --left;
  }
  for (const Case& one : cases) {
    Check(one.cargo->whole(), where + ": all was packed and unpacked", __FILE__, __LINE__);
    const std::string difference = conformance::Difference(
        *one.layout, one.cargo->output.data(), one.expected.data(), {0, one.layout->nbytes()});
    Check(difference.empty(), where + ": " + difference, __FILE__, __LINE__);
  }
  wait(*c.Barrier(), "barrier");
}

}  // namespace testing
