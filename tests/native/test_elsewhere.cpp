// Calls of one name that ranks make in different process sets.
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine_ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;
using testing::Float;
using testing::InPlace;
using testing::OnRanks;
using testing::Spec;

namespace {

// The calls of one rank, none of which waits: a sum of one element each.
class Calls {
 public:
  explicit Calls(Engine* engine) : engine_(engine) {}

  int Start(const std::string& name, int set) {
    Call& call = calls_.emplace_back();
    auto spec = std::make_shared<DomainSpec>(*Spec(name, {Float(name, 1)}));
    spec->process_set = set;
    Submission submission = InPlace(call.data);
    submission.done = [&call](const Result& result) {
      call.status = result.status;
      call.done.store(true, std::memory_order_release);
    };
    engine_->Submit(engine_->Open(spec), 0, std::move(submission));
    return static_cast<int>(calls_.size()) - 1;
  }
  // The text with which the call failed; "" where it has reduced over `ranks` ranks.
  std::string End(int number, int ranks) {
    Call& call = calls_[static_cast<size_t>(number)];
    const auto done = [&call] { return call.done.load(std::memory_order_acquire); };
    for (const Nanos until = Now() + 60 * kSecond; !done();) {
      CHECK(Now() < until);
      engine_->StepUntil(done, 10 * kMillisecond);
    }
    if (call.status.ok()) {
      CHECK_EQ(call.data[0], static_cast<float>(ranks));
      return "";
    }
    CHECK_EQ(std::string(KindName(call.status.kind())), "Mismatch");
    return call.status.message();
  }

 private:
  struct Call {
    std::vector<float> data{1};
    Status status;
    std::atomic<bool> done{false};
  };
  Engine* const engine_;
  std::deque<Call> calls_;
};

EngineOptions AsksSoon() {
  EngineOptions options;
  options.ask_elsewhere = 300 * kMillisecond;
  return options;
}

}  // namespace

// Twice, so that what was found the first time is no news; and what all call in one set runs
// before, beside and after.
TEST(RanksThatWaitForEachOtherFailAlike) {
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> texts;  // by call
  OnRanks(
      3,
      [&](Engine& engine, int r) {
        const int pair = engine.AddProcessSet({0, 1}), ends = engine.AddProcessSet({0, 2});
        const std::string y_of_ends = "y@" + std::to_string(ends);  // as TensorFlow's part names it
        Calls calls(&engine);
        for (const std::string turn : {"first", "second"}) {
          std::map<std::string, int> failing;
          failing["x " + turn] = calls.Start("x", r == 1 ? pair : 0);
          if (r != 1)
            failing["y " + turn] = r == 0 ? calls.Start("y", 0) : calls.Start(y_of_ends, ends);
          CHECK_EQ(calls.End(calls.Start("all", 0), 3), "");
          for (const auto& [call, number] : failing) {
            const std::string text = calls.End(number, 0);
            std::lock_guard<std::mutex> lock(mutex);
            texts[call].push_back(text);
          }
          // What it did not call has failed there as well, and it has this to come.
          if (r == 1) {
            const std::string text = calls.End(calls.Start("y", 0), 0);
            std::lock_guard<std::mutex> lock(mutex);
            texts["y " + turn].push_back(text);
          }
          CHECK_EQ(calls.End(calls.Start("x", 0), 3), "");
          CHECK_EQ(calls.End(calls.Start("y", 0), 3), "");
          if (r != 2) CHECK_EQ(calls.End(calls.Start("x", pair), 2), "");
          if (r != 1) CHECK_EQ(calls.End(calls.Start(y_of_ends, ends), 2), "");
        }
      },
      AsksSoon());
  CHECK_EQ(texts.size(), size_t{4});
  for (const auto& [call, of_ranks] : texts) {
    CHECK_EQ(of_ranks.size(), size_t{3});
    for (const std::string& text : of_ranks) CHECK_EQ(text, of_ranks[0]);
    const bool x = call[0] == 'x';
    CHECK(of_ranks[0].find(x ? "allreduce of 'x'" : "allreduce of 'y'") != std::string::npos);
    CHECK(of_ranks[0].find("rank 0: process set 0 (rank 0-2)") != std::string::npos);
    CHECK(of_ranks[0].find(x ? "rank 1: process set 1 (rank 0-1)"
                             : "rank 2: process set 2 (rank 0, 2)") != std::string::npos);
  }
}

// Longer than it takes to ask: a rank that has both calls under way, or comes from one to the
// other, or is only late.
TEST(WhoComesLaterIsNotElsewhere) {
  OnRanks(
      3,
      [](Engine& engine, int r) {
        const int pair = engine.AddProcessSet({0, 1}), last = engine.AddProcessSet({1, 2});
        Calls calls(&engine);
        const auto start = [&calls](std::vector<std::pair<int, int>>* all, const std::string& name,
                                    int set, int ranks) {
          all->emplace_back(calls.Start(name, set), ranks);
        };
        std::vector<std::pair<int, int>> all;
        if (r != 0) start(&all, "apart", last, 2);
        for (const int both : {0, 1}) {  // this rank has both at once, the other one of them
          const std::string name = "both " + std::to_string(both);
          if (r == both) start(&all, name, pair, 2);
          if (r < 2) start(&all, name, 0, 3);
        }
        if (r == 0) start(&all, "apart", 0, 3);
        if (r != 1) start(&all, "late", 0, 3);
        for (const Nanos until = Now() + kSecond; Now() < until;)
          engine.StepUntil([] { return false; }, 10 * kMillisecond);
        for (const int both : {0, 1}) {
          const std::string name = "both " + std::to_string(both);
          if (r == 1 - both) start(&all, name, pair, 2);
          if (r == 2) start(&all, name, 0, 3);
        }
        if (r != 0) start(&all, "apart", 0, 3);
        if (r == 1) start(&all, "late", 0, 3);
        for (const auto& [number, ranks] : all) CHECK_EQ(calls.End(number, ranks), "");
      },
      AsksSoon());
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
