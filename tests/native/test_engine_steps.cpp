// Loops that callers step: who runs callbacks, who wakes whom, and how long a wait sleeps.
#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "comm/loopback/world.h"
#include "engine/engine.h"
#include "engine_ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;
using testing::OnRanks;

namespace {

DomainSpecPtr Spec(const std::string& name, std::vector<int64_t> counts, bool groups = false) {
  auto spec = std::make_shared<DomainSpec>();
  spec->name = name;
  for (size_t i = 0; i < counts.size(); ++i) {
    EntrySpec entry;
    entry.label = name + std::to_string(i);
    entry.shape = {counts[i]};
    spec->entries.push_back(entry);
    if (groups) spec->group_ends.push_back(static_cast<int>(i) + 1);
  }
  return spec;
}

Submission InPlace(std::vector<float>& data, std::function<void(const Result&)> done) {
  Submission submission;
  submission.input = submission.output = data.data();
  submission.done = std::move(done);
  return submission;
}

void SubmitStep(Engine& engine, const OpenBatchPtr& batch, int position, Submission submission) {
  engine.Submit(batch, position, std::move(submission), Then::kStep);
}

// For what is sure to come, so that a fault is an error and not a test that hangs.
void Await(const std::function<bool()>& condition) {
  for (const Nanos start = Now(); !condition(); std::this_thread::yield())
    if (Now() - start > 30 * kSecond) throw testing::Failure("waited 30 s");
}

class StillTransport final : public comm::Transport {
 public:
  explicit StillTransport(bool must_poll) : must_poll_(must_poll) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  comm::WorkPtr Send(int, comm::Tag, const void*, int64_t) override { return nullptr; }
  comm::WorkPtr Recv(int, comm::Tag, void*, int64_t) override { return nullptr; }
  void Post(int, const std::string&) override {}
  bool TakePosted(comm::Message*) override { return false; }
  int64_t moved_nbytes() const override { return 0; }
  void Progress() override {}
  Doorbell& bell() override { return bell_; }
  Doorbell* BellOf(int) override { return nullptr; }
  bool MustPoll() const override { return must_poll_; }
  void Abort(const Status&) override {}
  void ThrowIfAborted() override {}

 private:
  const bool must_poll_;
  DoorbellWord word_;
  Doorbell bell_{&word_, false};
};

}  // namespace

TEST(AMutedBellCountsAndIsCalled) {
  DoorbellWord word;
  Doorbell bell(&word, false);
  bell.Mute(true);
  const uint32_t ticket = bell.Ticket();
  bell.Ring();
  CHECK(bell.Ticket() != ticket);
  CHECK(bell.Sleep(ticket, 30 * kSecond));  // was rung: does not sleep
  std::atomic<bool> woken{false};
  std::thread sleeper([&] {
    const uint32_t before = bell.Ticket();
    bell.Sleep(before, 30 * kSecond);
    woken = true;
  });
  Await([&] { return word.sleepers.load() == 1; });
  bell.Call();
  Await([&] { return woken.load(); });
  sleeper.join();
}

TEST(WaitsKnowWhatIsExpected) {
  // On a virtual clock: the lengths that Pause would sleep, for a transport that must be polled.
  comm::Backoff backoff;
  constexpr Nanos kStart = kSecond, kEvent = kStart + 20 * kMillisecond;
  backoff.Expect(kEvent);
  Nanos now = kStart;
  int sleeps = 0;
  while (now < kEvent - 60 * kMicrosecond) {
    const Nanos length = backoff.NextSleep(now, true, kForever);
    CHECK(length > 0 && length <= kMillisecond);  // a wrong expectation costs no more than this
    now += length;
    ++sleeps;
  }
  CHECK(sleeps <= 25);
  CHECK(now <= kEvent);
  CHECK_EQ(backoff.NextSleep(now, true, kForever), 0);  // polls where it is expected
  now = kEvent + 20 * kMicrosecond;
  CHECK_EQ(backoff.NextSleep(now, true, kForever), 20 * kMicrosecond);
  Nanos last = 0;
  for (int i = 0; i < 30; ++i) last = backoff.NextSleep(now += kMillisecond, true, kForever);
  CHECK_EQ(last, kMillisecond);

  // Rung at every event: sleeps at once, as long as it may.
  comm::Backoff rung;
  rung.Expect(kEvent);
  CHECK_EQ(rung.NextSleep(kStart, false, 5 * kMillisecond), 5 * kMillisecond);
  CHECK_EQ(rung.NextSleep(kEvent, false, kSecond), 0);
  CHECK_EQ(rung.NextSleep(kEvent + kMillisecond, false, kSecond), kSecond);

  // Nothing is expected: polls, then sleeps longer and longer.
  comm::Backoff unknown;
  CHECK_EQ(unknown.NextSleep(kStart, true, kForever), 0);
  CHECK_EQ(unknown.NextSleep(kStart + kMillisecond, true, kForever), 20 * kMicrosecond);
  CHECK_EQ(unknown.NextSleep(kStart + kMillisecond, true, kForever), 30 * kMicrosecond);
  unknown.Reset();
  CHECK_EQ(unknown.NextSleep(kStart + kSecond, true, kForever), 0);
}

TEST(APauseEndsAtARing) {
  for (const bool must_poll : {false, true}) {
    StillTransport transport(must_poll);
    comm::Backoff backoff;
    backoff.Expect(Now() + 3600 * kSecond);
    const uint32_t ticket = transport.bell().Ticket();
    transport.bell().Ring();
    backoff.Pause(transport.bell(), ticket, must_poll);  // does not sleep
  }
}

TEST(ManyThreadsStep) {
  // Each thread has a domain of its own; all step the same loops, some wait by stepping, some do
  // not.
  constexpr int kThreads = 4, kSteps = 100;
  OnRanks(3, [](Engine& engine, int r) {
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        // Small groups and one that is left to the data thread.
        const auto spec = Spec("d" + std::to_string(t), {1, 3, t == 0 ? 20000 : 5}, true);
        for (int step = 0; step < kSteps; ++step) {
          std::vector<std::vector<float>> data;
          for (const EntrySpec& entry : spec->entries)
            data.emplace_back(entry.shape[0], float(r + t + step));
          std::atomic<int> left{3};
          const OpenBatchPtr batch = engine.Open(spec);
          for (int i = 0; i < 3; ++i) {
            Submission submission = InPlace(data[i], [&](const Result& result) {
              if (result.status.ok()) --left;
            });
            if ((step + i) % 3 == 0)
              engine.Submit(batch, i, std::move(submission));
            else
              SubmitStep(engine, batch, i, std::move(submission));
          }
          if (step % 2) engine.StepUntil([&] { return left == 0; });
          Await([&] { return left == 0; });
          for (const auto& values : data) good += values.back() == float(3 + 3 * (t + step));
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK_EQ(good.load(), kThreads * kSteps * 3);
  });
}

TEST(CallbacksMaySubmit) {
  // Chains: each callback opens and submits the next batch, by each of the calls, from whichever
  // thread it runs on.
  OnRanks(2, [](Engine& engine, int) {
    const auto spec = Spec("x", {2});
    std::vector<float> data{1, 1};
    std::atomic<int> steps{0};
    std::atomic<bool> failed{false};
    std::function<void(const Result&)> next = [&](const Result& result) {
      if (!result.status.ok()) failed = true;
      const int step = ++steps;
      if (step == 60) return;
      data[0] = 1;
      const OpenBatchPtr batch = engine.Open(spec);
      if (step % 2)
        engine.Submit(batch, 0, InPlace(data, next));
      else
        SubmitStep(engine, batch, 0, InPlace(data, next));
      engine.StepUntil([] { return false; }, kSecond);  // does nothing in a callback
    };
    SubmitStep(engine, engine.Open(spec), 0, InPlace(data, next));
    engine.StepUntil([&] { return steps == 60; });
    Await([&] { return steps == 60; });
    CHECK(!failed);
    CHECK_EQ(data[0], 2.0f);
  });
}

TEST(SubmitRunsNoCallback) {
  // A caller may hold a lock that its callbacks take: Open and Submit leave them to others.
  OnRanks(2, [](Engine& engine, int) {
    const auto spec = Spec("x", {2}), other = Spec("y", {2});
    std::mutex mutex;
    for (int step = 0; step < 200; ++step) {
      std::vector<float> x{1, 1}, y{1, 1};
      std::atomic<int> left{2};
      const auto done = [&](const Result&) {
        std::lock_guard<std::mutex> lock(mutex);
        --left;
      };
      {
        std::lock_guard<std::mutex> lock(mutex);
        engine.Submit(engine.Open(spec), 0, InPlace(x, done));
      }
      SubmitStep(engine, engine.Open(other), 0, InPlace(y, done));
      engine.StepUntil([&] { return left == 0; });
      Await([&] { return left == 0; });
    }
  });
}

TEST(ABatchThatIsOnlyOpenFails) {
  // Opening wakes nobody; what it has to hear, it hears all the same.
  OnRanks(2, [](Engine& engine, int r) {
    const auto spec = Spec("x", {1, 1});
    const OpenBatchPtr batch = engine.Open(spec);
    std::vector<float> data{1};
    if (r == 0) {
      engine.Abandon(batch, "given up");
    } else {
      std::atomic<bool> failed{false};
      std::vector<float> more{1};
      SubmitStep(engine, batch, 0, InPlace(data, [&](const Result& result) {
                   failed = result.status.kind() == Kind::kAbandoned;
                 }));
      SubmitStep(engine, batch, 1, InPlace(more, nullptr));
      Await([&] { return failed.load(); });
    }
  });
}

TEST(AnErrorInACallersStepEndsTheEngine) {
  // Rank 1 dies while rank 0 steps: the caller gets its callback with the cause, not an exception.
  auto worlds = comm::MakeLoopbackWorlds(2, {});
  comm::World* dying = worlds[1].get();
  std::thread other([world = std::move(worlds[1])]() mutable {
    Engine engine(std::move(world), {});
    Await([&] { return !engine.failure().ok(); });
  });
  {
    Engine engine(std::move(worlds[0]), {});
    std::vector<float> data{1};
    std::atomic<bool> failed{false};
    SubmitStep(engine, engine.Open(Spec("x", {1})), 0,
               InPlace(data, [&](const Result& result) { failed = !result.status.ok(); }));
    comm::KillLoopbackRank(*dying, 1);
    const Nanos start = Now();
    while (!failed && Now() - start < 30 * kSecond)
      engine.StepUntil([&] { return failed.load(); }, kMillisecond);
    CHECK(failed);
    CHECK(!engine.failure().ok());
    CHECK_ERROR(engine.Open(Spec("y", {1})), engine.failure().kind(), "rank 1");
  }
  other.join();
}

TEST(JoinAndShutdownWarn) {
  EngineOptions options;
  options.stall_warn = kSecond;
  options.stall_fail = 2 * kSecond;  // not of these
  std::mutex mutex;
  std::string lines;
  SetLogSink([&](LogLevel, const std::string& line) {
    std::lock_guard<std::mutex> lock(mutex);
    lines += line + "\n";
  });
  const auto logged = [&](const std::string& part) {
    std::lock_guard<std::mutex> lock(mutex);
    return lines.find(part) != std::string::npos;
  };
  OnRanks(
      2,
      [&](Engine& engine, int r) {
        if (r == 0) Await([&] { return logged(" s in join(): not called by rank 0"); });
        engine.Join();
        if (r == 0) {
          Await([&] { return logged(" s in shutdown(): not called by rank 0"); });
          CHECK(engine.failure().ok());
        }
      },
      options);
  SetLogSink(nullptr);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
