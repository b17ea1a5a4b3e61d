// Plans of domains: every batch looks the same on all ranks, whatever happens while it changes.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "comm/loopback/world.h"
#include "engine/batch_times.h"
#include "engine/engine.h"
#include "engine/plan_report.h"
#include "engine_ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;
using reduce::ReduceOp;
using testing::OnRanks;
using testing::Seed;

namespace {

constexpr int kEntries = 12;

EngineOptions Quick() {
  EngineOptions options;
  options.plan_batches = 4;
  return options;
}

std::shared_ptr<DomainSpec> Spec(const std::string& name, bool planned, int process_set = 0) {
  auto spec = std::make_shared<DomainSpec>();
  spec->name = name;
  spec->process_set = process_set;
  spec->planned = planned;
  for (int i = 0; i < kEntries; ++i) {
    EntrySpec entry;
    entry.label = "t" + std::to_string(i);
    entry.shape = {1 + 700 * i};
    entry.reduce_op = i % 3 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
    spec->entries.push_back(entry);
  }
  spec->group_ends = {3, 6, 9, 12};
  return spec;
}

float Value(int rank, int step, int entry, size_t i) {
  return 1.0f / static_cast<float>(1 + rank * 7 + step + entry * 3 + (i % 11));
}

// One batch under way, with the caller's tensors.
struct Step {
  OpenBatchPtr batch;
  std::vector<std::vector<float>> data{kEntries};
  std::atomic<int> left{kEntries}, failed{0};

  Step(Engine& engine, const DomainSpecPtr& spec, int rank, int step) : batch(engine.Open(spec)) {
    for (int e = 0; e < kEntries; ++e) {
      data[e].resize(spec->entries[e].shape[0]);
      for (size_t i = 0; i < data[e].size(); ++i) data[e][i] = Value(rank, step, e, i);
    }
  }
  void Submit(Engine& engine, int e) {
    Submission submission;
    submission.input = submission.output = data[e].data();
    submission.done = [this](const Result& result) {
      if (!result.status.ok()) ++failed;
      --left;
    };
    engine.Submit(batch, e, std::move(submission));
  }
  void Wait() {
    const Nanos start = Now();
    while (left > 0) {
      std::this_thread::yield();
      if (Now() - start > 30 * kSecond) throw testing::Failure("a batch does not end");
    }
  }
};

void Shuffle(std::vector<int>* order, std::mt19937_64& random) {
  for (size_t i = order->size(); i > 1; --i) std::swap((*order)[i - 1], (*order)[random() % i]);
}

// Runs `steps` batches, `open` of which are under way at once; entries become ready in the order
// t11, t10, ... with delays. Returns the bits.
std::vector<float> Train(Engine& engine, const DomainSpecPtr& spec, int rank, int steps, int open,
                         std::mt19937_64& random) {
  std::vector<float> bits;
  for (int first = 0; first < steps; first += open) {
    std::vector<std::unique_ptr<Step>> under_way;
    for (int k = 0; k < open; ++k)
      under_way.push_back(std::make_unique<Step>(engine, spec, rank, first + k));
    for (auto& step : under_way) {
      std::vector<int> order(kEntries);
      std::iota(order.begin(), order.end(), 0);
      if (random() % 2)
        Shuffle(&order, random);
      else
        std::reverse(order.begin(), order.end());
      for (const int e : order) {
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        step->Submit(engine, e);
      }
    }
    for (auto& step : under_way) {
      step->Wait();
      CHECK_EQ(step->failed.load(), 0);
      for (const auto& tensor : step->data) bits.insert(bits.end(), tensor.begin(), tensor.end());
    }
  }
  return bits;
}

PlanReport ReportOf(Engine& engine, const std::string& domain) {
  for (PlanReport& report : engine.PlanReports())
    if (report.domain == domain) return report;
  throw testing::Failure("no report of " + domain);
}

}  // namespace

TEST(PlansChangeAndBitsDoNot) {
  for (const int n : {2, 3})
    for (const int open : {1, 3}) {
      std::vector<int64_t> digests(n);
      OnRanks(
          n,
          [&](Engine& engine, int r) {
            std::mt19937_64 random(Seed() + r);
            const int steps = 60;
            const auto planned = Train(engine, Spec("planned", true), r, steps, open, random);
            const auto fixed = Train(engine, Spec("fixed", false), r, steps, open, random);
            CHECK(planned == fixed);
            const PlanReport report = ReportOf(engine, "planned");
            CHECK(report.planned);
            CHECK_EQ(report.batches, steps);
            CHECK(report.changes > 0);
            CHECK_EQ(engine.metrics().plan_changes, report.changes);
            CHECK_EQ(report.ready.size(), size_t(kEntries));
            CHECK_EQ(report.predicted.times.size(), report.arrangement->group_ends.size());
            CHECK(!report.costs.empty());
            digests[r] = report.arrangement->Digest();
          },
          Quick());
      for (const int64_t digest : digests) CHECK_EQ(digest, digests[0]);
    }
}

TEST(AlikeProposalsCountFromTheSecondBatchOn) {
  for (const bool alike : {true, false})
    OnRanks(3, [alike](Engine& engine, int r) {
      auto spec = Spec("graph", false);
      auto proposal = std::make_shared<Arrangement>(*spec->Listed());
      std::reverse(proposal->order.begin(), proposal->order.end());
      proposal->group_ends = {5, 12};
      if (!alike && r == 1) proposal->group_ends = {4, 12};
      spec->proposal = proposal;
      std::mt19937_64 random(Seed() + r);
      Train(engine, spec, r, 6, 2, random);
      const PlanReport report = ReportOf(engine, "graph");
      CHECK_EQ(report.arrangement->group_ends.size(), size_t(alike ? 2 : 4));
      CHECK_EQ(report.arrangement->order[0], alike ? kEntries - 1 : 0);
      CHECK_EQ(report.changes, 0);
    });
}

TEST(AnyBatchMayBeAbandoned) {
  // Whichever batch is given up, by any rank, at any of its entries: the deciding ones are among
  // them.
  OnRanks(
      3,
      [](Engine& engine, int r) {
        const auto spec = Spec("planned", true);
        std::mt19937_64 common(Seed()), random(Seed() + 1 + r);
        for (int step = 0; step < 80; ++step) {
          const bool abandon = common() % 3 == 0;
          const int who = static_cast<int>(common() % 3),
                    after = static_cast<int>(common() % kEntries);
          Step pass(engine, spec, r, step);
          int submitted = 0;
          for (int e = kEntries - 1; e >= 0; --e) {
            if (abandon && who == r && submitted == after) break;
            pass.Submit(engine, e);
            ++submitted;
          }
          if (abandon && who == r) {
            engine.Abandon(pass.batch, "given up");
            pass.left -= kEntries - submitted;
          }
          pass.Wait();
          if (!abandon) CHECK_EQ(pass.failed.load(), 0);
        }
        std::mt19937_64 calm(Seed());
        Train(engine, spec, r, 30, 1, calm);
        CHECK(ReportOf(engine, "planned").changes > 0);
      },
      Quick());
}

TEST(JoinsAtAnyBatch) {
  // Ranks run out of steps one after the other; then all begin anew together.
  for (int first = 0; first < 12; ++first)
    OnRanks(
        3,
        [first](Engine& engine, int r) {
          const auto spec = Spec("planned", true);
          std::mt19937_64 random(Seed() + r);
          for (int round = 0; round < 2; ++round) {
            const int steps = first + 3 * ((r + round) % 3);
            for (int step = 0; step < steps; step += 2) {
              Step a(engine, spec, r, step), b(engine, spec, r, step + 1);
              for (int e = 0; e < kEntries; ++e) a.Submit(engine, e);
              for (int e = 0; e < kEntries; ++e) b.Submit(engine, kEntries - 1 - e);
              if (random() % 2) a.Wait();
              b.Wait();
              a.Wait();
              CHECK_EQ(a.failed + b.failed, 0);
            }
            engine.Join();
          }
          Train(engine, spec, r, 20, 2, random);
          CHECK_EQ(ReportOf(engine, "planned").batches, 20);
        },
        Quick());
}

TEST(PlansOfProcessSets) {
  OnRanks(
      4,
      [](Engine& engine, int r) {
        const int odd = engine.AddProcessSet({1, 3}), most = engine.AddProcessSet({0, 1, 2});
        std::mt19937_64 random(Seed() + r);
        for (int k = 0; k < 10; ++k) {
          Train(engine, Spec("all", true), r, 3, 1, random);
          if (r % 2) Train(engine, Spec("x", true, odd), r, 3, 1, random);
          if (r < 3) Train(engine, Spec("x", true, most), r, 3, 3, random);
        }
        CHECK_EQ(engine.PlanReports().size(), size_t(r == 1 ? 3 : 2));
        // What nobody else brings fails, and what is held behind it; no domain is kept.
        std::vector<std::unique_ptr<Step>> alone;
        for (int k = 0; r == 3 && k < 3; ++k)
          alone.push_back(std::make_unique<Step>(engine, Spec("y", true, odd), r, k));
        for (auto& step : alone)
          for (int e = 0; e < kEntries; ++e) step->Submit(engine, e);
        engine.RemoveProcessSet(odd);
        engine.RemoveProcessSet(most);
        for (auto& step : alone) {
          step->Wait();
          CHECK_EQ(step->failed.load(), kEntries);
        }
        CHECK_EQ(engine.PlanReports().size(), size_t{1});
      },
      Quick());
}

TEST(ShutdownFailsWhatIsHeld) {
  OnRanks(
      2,
      [](Engine& engine, int r) {
        if (r == 0) return;
        const auto spec = Spec("planned", true);
        Step first(engine, spec, r, 0), second(engine, spec, r, 1);
        for (int e = 0; e < kEntries; ++e) {
          first.Submit(engine, e);
          second.Submit(engine, e);
        }
        first.Wait();
        second.Wait();
        CHECK_EQ(first.failed + second.failed, 2 * kEntries);
      },
      Quick());
}

TEST(AnotherTraceOfADomain) {
  // The same name with other entries, in turn: each has its own order, and batches stay in step.
  OnRanks(
      2,
      [](Engine& engine, int r) {
        auto other = Spec("planned", true);
        other->group_ends = {6, 12};
        auto small = Spec("planned", true);
        small->entries.resize(2);
        small->group_ends = {1, 2};
        std::mt19937_64 random(Seed() + r);
        const auto spec = Spec("planned", true);
        for (int k = 0; k < 20; ++k) {
          Train(engine, spec, r, 1, 1, random);
          Train(engine, other, r, 1, 1, random);
          std::vector<float> a(1, 1.0f), b(701, 2.0f);
          std::vector<Submission> submissions(2);
          submissions[0].input = submissions[0].output = a.data();
          submissions[1].input = submissions[1].output = b.data();
          engine.RunBlocking(small, std::move(submissions));
          CHECK_EQ(b[700], 4.0f);
        }
      },
      Quick());
}

TEST(PositionsAreTheCallers) {
  OnRanks(
      2,
      [](Engine& engine, int r) {
        std::mt19937_64 random(Seed() + r);
        const auto spec = Spec("planned", true);
        Train(engine, spec, r, 20, 1, random);
        Step step(engine, spec, r, 0);
        step.Submit(engine, 3);
        Submission again;
        CHECK_ERROR(engine.Submit(step.batch, 3, std::move(again)), Kind::kInvalidArgument, "'t3'");
        CHECK_ERROR(engine.Submit(step.batch, kEntries, {}), Kind::kInvalidArgument, "12 entries");
        for (int e = 0; e < kEntries; ++e)
          if (e != 3) step.Submit(engine, e);
        step.Wait();
      },
      Quick());
}

TEST(ABatchEndsWithTheGroupThatRanLast) {
  // Groups run in the order in which they become ready, which need not be that of the plan.
  const auto spec = Spec("measured", true);
  const FormPtr form = MakeForm(spec, Purpose::kPlain, spec->Listed());
  auto store = std::make_shared<TimesStore>(4, std::make_shared<LastBatch>());
  store->Restart(form->arrangement, 0);
  const std::vector<int64_t> sizes = ProbeSizes(*spec);
  const std::vector<Nanos> costs(sizes.size(), 100);
  const Nanos begin = Now();
  for (int batch = 0; batch < 5; ++batch) {
    BatchTimes times(store, form, batch);
    for (int g = 3; g >= 0; --g) {
      const Nanos start = begin + batch * 1000 + (3 - g) * 200;
      times.GroupRan(g, start, start + 150);
    }
  }
  const Measured measured = store->Read(kEntries, sizes, costs, 1);
  CHECK(!measured.lacking);
  CHECK_EQ(measured.end, 1000);
  CHECK_EQ(measured.round, 50);
  // Costs of another number of sizes do not count; nothing was probed.
  CHECK(store->Read(kEntries, sizes, {100}, 1).unprobed);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
