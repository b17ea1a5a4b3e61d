// Slots: who may pack when, what is packed early and late, and what it costs in memory.
#include <atomic>
#include <random>
#include <thread>

#include "base/clock.h"
#include "chunking_world.h"
#include "comm/loopback/world.h"
#include "engine/slots.h"
#include "engine_ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;
using reduce::ReduceOp;
using testing::Float;
using testing::InPlace;
using testing::OnRanks;
using testing::Reduce;
using testing::Spec;

namespace {

// Calls `body` with a communicator of one rank.
void WithCommunicator(const std::function<void(comm::Communicator&)>& body) {
  auto worlds = comm::MakeLoopbackWorlds(1);
  body(*worlds[0]->MakeData({0}, 0));
}

// Of a communicator of one rank, which waits for nobody.
SlotPtr Run(Slots& slots, const DomainSpec& spec, int group, comm::Communicator& communicator) {
  SlotPtr slot;
  CHECK(slots.OnRun(spec.name, *PlanOf(spec), group, communicator, &slot));
  return slot;
}

// Returns when `flag` is set, or fails.
void Await(const std::atomic<bool>& flag) {
  const Nanos start = Now();
  while (!flag) {
    if (Now() - start > 20 * kSecond) throw testing::Failure("waited in vain");
    std::this_thread::yield();
  }
}

}  // namespace

TEST(BatchesQueueForASlot) {
  WithCommunicator([](comm::Communicator& communicator) {
    const comm::SegmentPtr segment = communicator.Alloc(4096);
    Slot slot({segment.get(), 128, 3968}, 1);
    int a, b;
    CHECK(slot.StartPack(&a) != nullptr);
    CHECK(slot.StartPack(&b) == nullptr);  // behind a, also when a's packer has left
    slot.EndPack();
    CHECK(slot.StartPack(&b) == nullptr);
    CHECK(slot.Enter(&a));
    CHECK(slot.StartPack(&b) == nullptr);  // a runs
    slot.Leave();
    slot.Quit(&a);
    CHECK(slot.StartPack(&b) != nullptr);
    slot.EndPack();
    slot.Quit(&b);  // failed: its bytes are nobody's
    CHECK(!slot.Enter(nullptr));
    slot.Leave();
    CHECK(!slot.Enter(&b));
    slot.Leave();
  });
}

TEST(ARunTakesTheSlotOfAnother) {
  WithCommunicator([](comm::Communicator& communicator) {
    const comm::SegmentPtr segment = communicator.Alloc(4096);
    Slot slot({segment.get(), 128, 3968}, 1);
    int a, b;
    CHECK(slot.StartPack(&a) != nullptr);
    std::atomic<bool> entered{false};
    std::thread run([&] {
      CHECK(!slot.Enter(&b));
      entered = true;
    });
    while (slot.StartPack(&a) != nullptr) {  // until the run waits for the packers of a
      slot.EndPack();
      std::this_thread::yield();
    }
    CHECK(!entered);
    slot.EndPack();
    Await(entered);
    run.join();
    slot.Leave();
    slot.Quit(&b);
    CHECK(slot.StartPack(&a) == nullptr);  // what it packed is gone, so all of a is packed later
    CHECK(!slot.Enter(&a));
    slot.Leave();
  });
}

TEST(ACloseWaitsForPackers) {
  WithCommunicator([](comm::Communicator& communicator) {
    const comm::SegmentPtr segment = communicator.Alloc(4096);
    Slot slot({segment.get(), 128, 3968}, 1);
    int a;
    char* const at = slot.StartPack(&a);
    std::atomic<bool> closed{false};
    std::thread close([&] {
      slot.Close();
      closed = true;
    });
    while (slot.StartPack(&a) != nullptr) {
      slot.EndPack();
      std::this_thread::yield();
    }
    CHECK(!closed);
    CHECK(at == static_cast<char*>(segment->data()) + 128);
    slot.EndPack();
    Await(closed);
    close.join();
  });
}

TEST(SlotsComeWithTheSecondRunAndGo) {
  WithCommunicator([](comm::Communicator& communicator) {
    Slots slots(1 << 20);
    const auto spec = Spec("x", {Float("a", 1000), Float("b", 1 << 20)}, {1, 2});
    const Plan& plan = *PlanOf(*spec);
    CHECK(slots.Find("x", plan).empty());
    CHECK(Run(slots, *spec, 0, communicator) == nullptr);
    const SlotPtr slot = Run(slots, *spec, 0, communicator);
    CHECK(slot != nullptr);
    CHECK(Run(slots, *spec, 0, communicator) == slot);
    CHECK(Run(slots, *spec, 1, communicator) == nullptr);  // too large
    CHECK(Run(slots, *spec, 1, communicator) == nullptr);
    CHECK_EQ(slots.nbytes(), Arenas::kFirst);
    CHECK(slots.Find("x", *PlanOf(*Spec("x", {Float("c", 1000), Float("d", 1 << 20)},
                                        {1, 2})))[0] == slot);  // the same layout
    const auto grown = Spec("x", {Float("a", 1000), Float("b", 2 << 20)}, {1, 2});
    CHECK(Run(slots, *grown, 1, communicator) == nullptr);
    CHECK(slots.Find("x", *PlanOf(*grown))[0] == slot);  // another group has none, and is another
    const auto other = Spec("x", {Float("a", 2000), Float("b", 1 << 20)}, {1, 2});
    CHECK(slots.Find("x", *PlanOf(*other)).empty());
    CHECK(Run(slots, *other, 0, communicator) == nullptr);
    CHECK_EQ(slots.nbytes(), 0);
    CHECK(slot->StartPack(&slots) == nullptr);  // closed
    CHECK(Run(slots, *other, 0, communicator) != nullptr);
    CHECK_EQ(slots.nbytes(), Arenas::kFirst);
    slots.Close();
    CHECK_EQ(slots.nbytes(), 0);
    CHECK(slots.Find("x", *PlanOf(*other)).empty());
  });
}

TEST(SlotsHaveABudget) {
  WithCommunicator([](comm::Communicator& communicator) {
    Slots slots(1 << 30);
    const auto big = [](int i) {
      return Spec("big" + std::to_string(i), {Float("x", 5 << 20)});  // a bit more than 20 MiB
    };
    int with = 0;
    for (int i = 0; i < 5; ++i) {
      const auto spec = big(i);
      Run(slots, *spec, 0, communicator);
      with += Run(slots, *spec, 0, communicator) != nullptr;
    }
    CHECK_EQ(with, 3);
    CHECK(slots.nbytes() <= Slots::kBudget);
    // Those that do not run make room.
    const auto small = Spec("small", {Float("x", 1)});
    for (int i = 0; i < 1100; ++i) Run(slots, *small, 0, communicator);
    const auto spec = big(4);
    CHECK(Run(slots, *spec, 0, communicator) != nullptr);
    CHECK(slots.nbytes() < 30 << 20);
    // A hundred thousand names that run once take none.
    for (int i = 0; i < 100000; ++i) {
      const auto once = Spec("once" + std::to_string(i), {Float("x", 1)});
      CHECK(Run(slots, *once, 0, communicator) == nullptr);
    }
    CHECK_EQ(slots.nbytes(), 0);
    slots.Close();
  });
}

namespace {

// One tensor of a domain: how it is reduced, and what comes out for inputs of Value.
struct Case {
  EntrySpec entry;
  bool absent_on_1 = false;
};

int64_t Value(int rank, int step, int64_t i) { return (rank + 1) * (step % 3 + 1) * (i % 7 + 1); }

template <class T>
void Store(std::vector<char>* data, int64_t i, int64_t value) {
  reinterpret_cast<T*>(data->data())[i] = static_cast<T>(value);
}
template <class T>
int64_t Load(const std::vector<char>& data, int64_t i) {
  return static_cast<int64_t>(reinterpret_cast<const T*>(data.data())[i]);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](DType dtype, DType wire, ReduceOp op, int64_t count) -> Case& {
    Case c;
    c.entry = Float("t" + std::to_string(cases.size()), count, op);
    c.entry.dtype = dtype;
    c.entry.wire = wire;
    cases.push_back(c);
    return cases.back();
  };
  add(DType::kFloat32, DType::kFloat32, ReduceOp::kSum, 1);
  add(DType::kFloat32, DType::kFloat32, ReduceOp::kSum, 1023).entry.prescale = 2;
  add(DType::kInt64, DType::kInt64, ReduceOp::kAverage, 333);
  add(DType::kFloat32, DType::kFloat16, ReduceOp::kSum, 777);
  add(DType::kInt32, DType::kInt32, ReduceOp::kAverage, 65);
  add(DType::kFloat64, DType::kFloat64, ReduceOp::kMax, 129).absent_on_1 = true;
  add(DType::kFloat32, DType::kFloat32, ReduceOp::kSum, 0);
  add(DType::kFloat32, DType::kFloat32, ReduceOp::kSum, 5000).absent_on_1 = true;
  add(DType::kInt64, DType::kInt64, ReduceOp::kMin, 100);
  add(DType::kFloat32, DType::kFloat32, ReduceOp::kAverage, 257).entry.postscale = 4;
  return cases;
}

void Put(const EntrySpec& entry, std::vector<char>* data, int64_t i, int64_t value) {
  if (entry.dtype == DType::kFloat32) Store<float>(data, i, value);
  if (entry.dtype == DType::kFloat64) Store<double>(data, i, value);
  if (entry.dtype == DType::kInt32) Store<int32_t>(data, i, value);
  if (entry.dtype == DType::kInt64) Store<int64_t>(data, i, value);
}
int64_t Get(const EntrySpec& entry, const std::vector<char>& data, int64_t i) {
  if (entry.dtype == DType::kFloat32) return Load<float>(data, i);
  if (entry.dtype == DType::kFloat64) return Load<double>(data, i);
  if (entry.dtype == DType::kInt32) return Load<int32_t>(data, i);
  return Load<int64_t>(data, i);
}

// Of ranks 0 to n - 1 that take part.
int64_t Expected(const Case& c, int n, int size, int step, int64_t i) {
  int64_t sum = 0, low = INT64_MAX, high = INT64_MIN;
  for (int r = 0; r < n; ++r) {
    if (r == 1 && c.absent_on_1) continue;
    const int64_t v = Value(r, step, i);
    sum += v;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  switch (c.entry.reduce_op) {
    case ReduceOp::kMax:
      return high;
    case ReduceOp::kMin:
      return low;
    case ReduceOp::kAverage:
      return static_cast<int64_t>(c.entry.postscale) * sum / size;
    default:
      return static_cast<int64_t>(c.entry.prescale) * sum;
  }
}

// One step of all cases: submitted in an order of this rank's own, some of them from a thread.
void Step(Engine& engine, const DomainSpecPtr& spec, const std::vector<Case>& cases, int rank,
          int n, int size, int step, std::mt19937* random) {
  const int count = static_cast<int>(cases.size());
  std::vector<std::vector<char>> in(count), out(count);
  std::vector<int> order;
  for (int i = 0; i < count; ++i) {
    const EntrySpec& entry = cases[i].entry;
    in[i].resize(entry.count() * DTypeSize(entry.dtype) + 1);
    out[i] = in[i];
    for (int64_t k = 0; k < entry.count(); ++k) Put(entry, &in[i], k, Value(rank, step, k));
    order.push_back(i);
  }
  std::shuffle(order.begin(), order.end(), *random);
  std::atomic<int> left{count};
  std::atomic<bool> failed{false};
  const OpenBatchPtr batch = engine.Open(spec);
  const auto submit = [&](int i) {
    Submission submission;
    submission.absent = rank == 1 && cases[i].absent_on_1;
    if (!submission.absent) submission.input = in[i].data();
    submission.output = (i + step) % 2 ? in[i].data() : out[i].data();
    submission.done = [&](const Result& result) {
      if (!result.status.ok()) failed = true;
      --left;
    };
    engine.Submit(batch, i, std::move(submission));
  };
  std::thread other([&] {
    for (int i = 0; i < count / 2; ++i) submit(order[i]);
  });
  for (int i = count / 2; i < count; ++i) {
    if (rank == 0 && step % 5 == 4) std::this_thread::sleep_for(std::chrono::microseconds(300));
    submit(order[i]);
  }
  other.join();
  const Nanos start = Now();
  while (left > 0 && Now() - start < 30 * kSecond) std::this_thread::yield();
  CHECK_EQ(left.load(), 0);
  CHECK(!failed);
  for (int i = 0; i < count; ++i) {
    const std::vector<char>& result = (i + step) % 2 ? in[i] : out[i];
    for (int64_t k = 0; k < cases[i].entry.count(); ++k)
      CHECK_EQ(Get(cases[i].entry, result, k), Expected(cases[i], n, size, step, k));
  }
}

DomainSpecPtr SpecOf(const std::vector<Case>& cases) {
  std::vector<EntrySpec> entries;
  for (const Case& c : cases) entries.push_back(c.entry);
  return Spec("grads", entries, {2, 3, 8, 10});
}

}  // namespace

TEST(EarlyAndLatePackingGiveTheSame) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  for (int n : {1, 2, 3, 4})
    for (int64_t limit : {int64_t{0}, int64_t{8192}, int64_t{1} << 40}) {
      EngineOptions options;
      options.slot_nbytes = limit;
      OnRanks(
          n,
          [&](Engine& engine, int r) {
            const std::vector<Case> cases = Cases();
            const auto spec = SpecOf(cases);
            std::mt19937 random(seed + static_cast<unsigned>(r));
            for (int step = 0; step < 20; ++step) Step(engine, spec, cases, r, n, n, step, &random);
            const int64_t early = engine.metrics().packed_early;
            if (limit == 0) CHECK_EQ(early, 0);
            if (limit > 8192) CHECK(early >= 10 * 15);  // all but those of the first steps
            if (limit == 8192) CHECK(early > 0);
          },
          options, true,
          [](std::unique_ptr<comm::World> world) {
            return std::make_unique<testing::ChunkingWorld>(std::move(world));
          });
    }
}

TEST(JoinedRanksUseTheirSlots) {
  OnRanks(3, [](Engine& engine, int r) {
    const std::vector<Case> cases = Cases();
    const auto spec = SpecOf(cases);
    std::mt19937 random(static_cast<unsigned>(r));
    for (int step = 0; step < 12; ++step)
      if (r < 2 || step < 6) Step(engine, spec, cases, r, step < 6 ? 3 : 2, 3, step, &random);
    engine.Join();
    Step(engine, spec, cases, r, 3, 3, 1, &random);
  });
}

TEST(BatchesOfOneDomainAtATime) {
  // Several are open at once: the later ones keep their tensors, or pack when the others have run.
  OnRanks(2, [](Engine& engine, int r) {
    const auto spec = Spec("x", {Float("a", 1000), Float("b", 1000)});
    for (int round = 0; round < 20; ++round) {
      constexpr int kDeep = 5;
      std::vector<std::vector<float>> data;
      std::atomic<int> left{2 * kDeep};
      std::vector<OpenBatchPtr> batches;
      for (int k = 0; k < kDeep; ++k) batches.push_back(engine.Open(spec));
      for (int k = 0; k < 2 * kDeep; ++k) data.emplace_back(1000, float(k + r));
      for (int k = 0; k < kDeep; ++k) {
        const int batch = r == 0 || round % 2 ? k : kDeep - 1 - k;  // the last one first
        for (int i = 0; i < 2; ++i) {
          Submission submission = InPlace(data[2 * batch + i]);
          submission.done = [&](const Result& result) { left -= result.status.ok() ? 1 : 1000; };
          engine.Submit(batches[batch], i, std::move(submission));
        }
      }
      const Nanos start = Now();
      while (left > 0 && Now() - start < 30 * kSecond) std::this_thread::yield();
      CHECK_EQ(left.load(), 0);
      for (int k = 0; k < 2 * kDeep; ++k) CHECK_EQ(data[k][999], float(2 * k + 1));
    }
    CHECK(engine.metrics().packed_early > 0);
  });
}

TEST(ABatchGivenUpWhileItsThreadPacks) {
  EngineOptions options;
  options.slot_nbytes = 4 << 20;
  OnRanks(
      2,
      [](Engine& engine, int r) {
        const auto spec = Spec("grads", {Float("a", 200000), Float("b", 200000), Float("c", 1)});
        for (int round = 0; round < 60; ++round) {
          const OpenBatchPtr batch = engine.Open(spec);
          const bool whole = round % 3 == 0;
          std::atomic<int> done{0}, good{0};
          auto submit = [&](int i) {
            // Freed in the callback: nobody may read it then.
            auto data =
                std::make_shared<std::vector<float>>(spec->entries[i].shape[0], float(r + 1));
            Submission submission = InPlace(*data);
            submission.done = [&, data](const Result& result) mutable {
              if (result.status.ok() && data->back() == 3.0f) ++good;
              std::fill(data->begin(), data->end(), -1.0f);
              data.reset();
              ++done;
            };
            engine.Submit(batch, i, std::move(submission));
          };
          std::thread a([&] { submit(0); }), b([&] { submit(1); });
          if (!whole && r == 0) engine.Abandon(batch, "round " + std::to_string(round));
          a.join();
          b.join();
          if (whole || r == 1) submit(2);
          const int submitted = whole || r == 1 ? 3 : 2;
          const Nanos start = Now();
          while (done < submitted && Now() - start < 30 * kSecond) std::this_thread::yield();
          CHECK_EQ(done.load(), submitted);
          CHECK_EQ(good.load(), whole ? 3 : 0);
        }
        CHECK(engine.metrics().packed_early > 0);
      },
      options);
}

TEST(SmallGroupsTakeLittleMemory) {
  OnRanks(2, [](Engine& engine, int) {
    const auto spec = Spec("two", {Float("a", 2), Float("b", 2)});
    for (int step = 0; step < 5; ++step) {
      std::vector<float> a{1, 2}, b{3, 4};
      std::vector<Submission> submissions;
      submissions.push_back(InPlace(a));
      submissions.push_back(InPlace(b));
      engine.RunBlocking(spec, std::move(submissions));
      CHECK_EQ(b[1], 8.0f);
    }
    CHECK(engine.metrics().fusion_buffer_nbytes > 0);
    CHECK(engine.metrics().fusion_buffer_nbytes < 1 << 20);
  });
}

// The last rank has room for four arenas; then all ranks use the same slots still.
TEST(OneRankWithoutRoom) {
  OnRanks(
      3,
      [](Engine& engine, int r) {
        std::vector<DomainSpecPtr> specs;
        for (int i = 0; i < 40; ++i)
          specs.push_back(Spec("s" + std::to_string(i), {Float("a", 1000 * (1 + i % 5))}));
        for (int step = 0; step < 6; ++step) {
          for (const DomainSpecPtr& spec : specs) {
            std::vector<float> data(spec->entries[0].shape[0], float(r + step));
            std::vector<Submission> submissions;
            submissions.push_back(InPlace(data));
            engine.RunBlocking(spec, std::move(submissions));
            CHECK_EQ(data.front(), float(3 + 3 * step));
            CHECK_EQ(data.back(), float(3 + 3 * step));
          }
        }
        CHECK(engine.metrics().packed_early >= 4 * 10);  // those that have a slot
        CHECK(engine.metrics().packed_early < 4 * 40);
      },
      EngineOptions(), true,
      [](std::unique_ptr<comm::World> world) {
        const bool last = world->topology().rank == 2;
        return std::make_unique<testing::ChunkingWorld>(std::move(world), last ? 4 : -1);
      });
}

TEST(CountsOfEarlyPacking) {
  OnRanks(2, [](Engine& engine, int r) {
    EntrySpec entry = Float("x", 3);
    entry.wire = DType::kFloat16;
    const auto spec = Spec("x", {entry});
    for (int step = 1; step <= 5; ++step) {
      std::vector<float> data{1, 1e6f, r ? 1.0f : 1.0f / 0.0f};
      std::vector<Submission> submissions;
      submissions.push_back(InPlace(data));
      engine.RunBlocking(spec, std::move(submissions));
      CHECK_EQ(engine.metrics().saturated, 2 * step);
      CHECK_EQ(engine.metrics().non_finite, step);
    }
    CHECK_EQ(engine.metrics().packed_early, 3);
  });
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
