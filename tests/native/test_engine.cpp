// The engine with ranks as threads of one process.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "engine_ranks.h"
#include "ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::engine;
using reduce::ReduceOp;
using testing::Float;
using testing::InPlace;
using testing::OnRanks;
using testing::Reduce;
using testing::Spec;

TEST(OneTensor) {
  for (int n : {1, 2, 3, 4, 5})
    OnRanks(n, [n](Engine& engine, int r) {
      for (int step = 0; step < 20; ++step) {
        const auto sum = Reduce(engine, "x", {float(r + step), 1.0f});
        CHECK_EQ(sum[0], float(n * (n - 1) / 2 + n * step));
        CHECK_EQ(sum[1], float(n));
      }
      CHECK_EQ(Reduce(engine, "avg", {float(r), 2}, ReduceOp::kAverage)[1], 2.0f);
    });
}

TEST(GroupsInAnyOrder) {
  OnRanks(3, [](Engine& engine, int r) {
    std::vector<EntrySpec> entries;
    for (int i = 0; i < 10; ++i) entries.push_back(Float("t" + std::to_string(i), i + 1));
    const auto spec = Spec("grads", entries, {2, 3, 7, 10});
    for (int step = 0; step < 30; ++step) {
      const OpenBatchPtr batch = engine.Open(spec);
      std::vector<std::vector<float>> data;
      for (int i = 0; i < 10; ++i) data.emplace_back(i + 1, float(r + i + step));
      std::atomic<int> left{10};
      std::atomic<bool> failed{false};
      for (int k = 0; k < 10; ++k) {
        const int stride = r == 0 ? 1 : r == 1 ? 3 : 7;  // a different order on each rank
        const int position = (k * stride + step) % 10;
        Submission submission = InPlace(data[position]);
        submission.done = [&](const Result& result) {
          if (!result.status.ok()) failed = true;
          --left;
        };
        engine.Submit(batch, position, std::move(submission));
      }
      while (left > 0) std::this_thread::yield();
      CHECK(!failed);
      for (int i = 0; i < 10; ++i) CHECK_EQ(data[i][i], float(3 + 3 * (i + step)));
    }
    CHECK(engine.metrics().groups >= 120);
  });
}

// See Note [Groups that run together] in engine/data_loop.cpp: with slots and without, with what
// runs alone among them, the next batch of a domain behind the one that runs.
TEST(CallsOfTheirOwnAtOnce) {
  constexpr int kCalls = 24, kSteps = 6;
  const std::vector<int64_t> counts{1, 700, 5000, 30000};
  for (const int64_t slot_limit : {int64_t{0}, EngineOptions().slot_nbytes})
    for (const int n : {2, 3}) {
      EngineOptions options;
      options.slot_nbytes = slot_limit;
      OnRanks(
          n,
          [&](Engine& engine, int r) {
            struct Call {
              DomainSpecPtr spec;
              std::vector<float> data;
            };
            std::vector<Call> calls(2 * kCalls);  // of two steps, whose batches overlap
            for (int i = 0; i < 2 * kCalls; ++i) {
              const std::string name = "call" + std::to_string(i % kCalls);
              EntrySpec entry = Float(name, counts[i % counts.size()]);
              if (i % kCalls % 7 == 6) entry.op = Op::kBroadcast;
              calls[i] = {Spec(name, {entry}), std::vector<float>(entry.shape[0])};
            }
            for (int step = 0; step < kSteps; ++step) {
              std::atomic<int> left{2 * kCalls};
              std::atomic<bool> failed{false};
              for (int k = 0; k < 2 * kCalls; ++k) {
                const int stride = r == 0 ? 1 : r == 1 ? 5 : 7;  // another order on each rank
                const int i = k / kCalls * kCalls + (k * stride + step) % kCalls;
                Call& call = calls[i];
                std::fill(call.data.begin(), call.data.end(), float(r + i + step));
                Submission submission = InPlace(call.data);
                submission.done = [&](const Result& result) {
                  if (!result.status.ok()) failed = true;
                  --left;
                };
                engine.Submit(engine.Open(call.spec), 0, std::move(submission),
                              k % 2 == 0 ? Then::kLeave : Then::kStep);
              }
              while (left > 0) std::this_thread::yield();
              CHECK(!failed);
              for (int i = 0; i < 2 * kCalls; ++i) {
                const float sum = n * (n - 1) / 2.0f + n * (i + step);
                const float expected = i % kCalls % 7 == 6 ? float(i + step) : sum;
                CHECK(std::all_of(calls[i].data.begin(), calls[i].data.end(),
                                  [&](float value) { return value == expected; }));
              }
            }
          },
          options);
    }
}

TEST(MismatchIsAlikeAndHarmless) {
  std::vector<std::string> texts(3);
  OnRanks(3, [&](Engine& engine, int r) {
    for (int round = 0; round < 3; ++round) {
      try {
        Reduce(engine, "x", std::vector<float>(r == 1 ? 4 : 3, 1.0f));
        throw testing::Failure("no error");
      } catch (const Error& e) {
        CHECK_EQ(std::string(KindName(e.kind())), "Mismatch");
        texts[r] = e.what();
      }
      CHECK_EQ(Reduce(engine, "x", {1})[0], 3.0f);
    }
  });
  CHECK_EQ(texts[0], texts[1]);
  CHECK_EQ(texts[0], texts[2]);
  CHECK(texts[0].find("[4]") != std::string::npos);
}

TEST(AbsentMembers) {
  OnRanks(3, [](Engine& engine, int r) {
    const auto spec = Spec("grads", {Float("some", 2), Float("none", 2)});
    std::vector<float> data{1, 2}, out{9, 9};
    std::vector<Submission> submissions(2);
    submissions[0].absent = r == 0;
    submissions[0].input = r == 0 ? nullptr : data.data();
    submissions[0].output = data.data();
    submissions[1].absent = true;
    submissions[1].output = out.data();
    const auto results = engine.RunBlocking(spec, std::move(submissions));
    CHECK_EQ(results[0].present, 2);
    CHECK_EQ(results[1].present, 0);
    CHECK_EQ(data[1], 4.0f);
    CHECK_EQ(out[0], 0.0f);
    CHECK_EQ(engine.metrics().partly_absent, 1);
  });
}

TEST(AbandonReachesPeers) {
  OnRanks(2, [](Engine& engine, int r) {
    const auto spec = Spec("grads", {Float("a", 1), Float("b", 1)});
    for (int round = 0; round < 5; ++round) {
      if (r == 0) {
        const OpenBatchPtr batch = engine.Open(spec);
        engine.Abandon(batch, "step failed");
      } else {
        std::vector<float> a{1}, b{1};
        std::vector<Submission> submissions;
        submissions.push_back(InPlace(a));
        submissions.push_back(InPlace(b));
        try {
          engine.RunBlocking(spec, std::move(submissions));
          throw testing::Failure("no error");
        } catch (const Error& e) {
          CHECK_EQ(std::string(KindName(e.kind())), "Abandoned");
          CHECK(std::string(e.what()).find("rank 0") != std::string::npos);
          CHECK(std::string(e.what()).find("step failed") != std::string::npos);
        }
      }
      CHECK_EQ(Reduce(engine, "ok", {1})[0], 2.0f);
    }
  });
}

TEST(AbandonLeavesAgreedGroupsAlone) {
  // A big group is under way on the data loop when the rest of its batch is given up: those behind
  // it in the queue that are agreed run to their end too.
  OnRanks(2, [](Engine& engine, int r) {
    std::vector<EntrySpec> entries{Float("big", 1 << 20)};
    for (int i = 0; i < 6; ++i) entries.push_back(Float("small" + std::to_string(i), 1));
    const auto spec = Spec("grads", entries, {1, 2, 3, 4, 5, 6, 7});
    for (int round = 0; round < 10; ++round) {
      std::atomic<int> reduced{0}, failed{0};
      std::vector<std::vector<float>> data;
      for (const EntrySpec& entry : entries) data.emplace_back(entry.shape[0], 1.0f);
      const OpenBatchPtr batch = engine.Open(spec);
      const int submitted = r == 0 ? 6 : 7;
      for (int i = 0; i < submitted; ++i) {
        Submission submission = InPlace(data[i]);
        submission.done = [&, i](const Result& result) {
          if (!result.status.ok())
            ++failed;
          else if (data[i].back() == 2.0f)
            ++reduced;
          else
            failed += 100;
        };
        engine.Submit(batch, i, std::move(submission));
      }
      if (r == 0) engine.Abandon(batch, "round " + std::to_string(round));
      while (reduced + failed < submitted) std::this_thread::yield();
      CHECK(failed < 100);
      CHECK(r == 0 || failed > 0);
      CHECK_EQ(Reduce(engine, "ok", {1})[0], 2.0f);
    }
  });
}

TEST(JoinSuppliesZeros) {
  OnRanks(3, [](Engine& engine, int r) {
    for (int step = 0; step < 2 + 3 * r; ++step) {
      const float expected = step < 2 ? 3 : step < 5 ? 2 : 1;
      CHECK_EQ(Reduce(engine, "x", {1})[0], expected);
    }
    CHECK_EQ(engine.Join(), 2);
    CHECK_EQ(Reduce(engine, "x", {1})[0], 3.0f);
  });
}

TEST(JoinWaitsForWhatWasOpened) {
  OnRanks(2, [](Engine& engine, int r) {
    const auto spec = Spec("x", {Float("x", 1)});
    std::atomic<int> done{0};
    std::vector<float> before{1}, before2{2}, after{float(r + 1)};
    const auto submit = [&](std::vector<float>& data) {
      Submission submission = InPlace(data);
      submission.done = [&](const Result& result) { done += result.status.ok() ? 1 : 100; };
      engine.Submit(engine.Open(spec), 0, std::move(submission));
    };
    submit(before);  // maybe unfinished when the join is asked for
    submit(before2);
    engine.Join();
    submit(after);
    while (done < 3) std::this_thread::yield();
    CHECK_EQ(done.load(), 3);
    CHECK_EQ(before[0], 2.0f);
    CHECK_EQ(before2[0], 4.0f);
    CHECK_EQ(after[0], 3.0f);
  });
}

TEST(AForkedChildLeavesTheEngineAlone) {
  OnRanks(2, [](Engine& engine, int r) {
    std::vector<float> data(3, float(r));
    const OpenBatchPtr batch = engine.Open(Spec("step", {Float("x", 3), Float("y", 3)}));
    if (r == 0) {
      const pid_t child = fork();
      if (child == 0) {
        int refused = 0;
        const auto refuse = [&refused](const std::function<void()>& call) {
          try {
            call();
          } catch (const Error& e) {
            refused += e.kind() == Kind::kNotInitialized;
          }
        };
        std::vector<float> other(3);
        refuse([&] { engine.Submit(batch, 0, InPlace(other), Then::kStep); });
        refuse([&] { engine.Submit(batch, 0, InPlace(other)); });
        refuse([&] { engine.Open(Spec("another", {Float("x", 3)})); });
        refuse([&] { engine.Join(); });
        refuse([&] { engine.Shutdown("a child"); });
        refuse([&] { engine.Abort({Kind::kInternal, "a child"}); });
        engine.Abandon(batch, "a child");
        engine.StepUntil([] { return false; });
        _exit(refused);
      }
      int status = 0;
      waitpid(child, &status, 0);
      CHECK(WIFEXITED(status));
      CHECK_EQ(WEXITSTATUS(status), 6);
    }
    std::atomic<int> good{0};
    std::vector<float> more(3, 2);
    for (std::vector<float>* tensor : {&data, &more}) {
      Submission submission = InPlace(*tensor);
      submission.done = [&](const Result& result) { good += result.status.ok(); };
      engine.Submit(batch, tensor == &more, std::move(submission));
    }
    for (const Nanos start = Now(); good < 2 && Now() - start < 30 * kSecond;)
      engine.StepUntil([&] { return good == 2; });
    CHECK_EQ(data[0], 1.0f);
    CHECK_EQ(more[0], 4.0f);
  });
}

TEST(ASecondShutdownSharesTheFirst) {
  OnRanks(2, [](Engine& engine, int) {
    std::vector<std::thread> threads;
    std::atomic<int> down{0};
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] {
        engine.Shutdown("done");
        ++down;
      });
    for (auto& thread : threads) thread.join();
    CHECK_EQ(down.load(), 3);
  });
}

TEST(OverflowInTheSumIsCounted) {
  OnRanks(2, [](Engine& engine, int) {
    EntrySpec entry = Float("x", 1);
    entry.wire = DType::kFloat16;
    std::vector<float> data{65000};
    std::vector<Submission> submissions;
    submissions.push_back(InPlace(data));
    engine.RunBlocking(Spec("x", {entry}), std::move(submissions));
    CHECK(data[0] > 1e30f);
    CHECK_EQ(engine.metrics().saturated, 1);
    CHECK_EQ(engine.metrics().non_finite, 0);
  });
}

TEST(ShutdownFailsWhatWaits) {
  OnRanks(2, [](Engine& engine, int r) {
    if (r == 0) return;
    try {
      Reduce(engine, "lonely", {1});
      throw testing::Failure("no error");
    } catch (const Error& e) {
      CHECK_EQ(std::string(KindName(e.kind())), "Abandoned");
      CHECK(std::string(e.what()).find("rank 0") != std::string::npos);
      CHECK(std::string(e.what()).find("done") != std::string::npos);
    }
  });
}

TEST(AStallNamesTheUsesOfOneLabel) {
  EngineOptions options;
  options.stall_warn = kSecond / 2;
  options.stall_fail = kSecond;
  OnRanks(
      2,
      [](Engine& engine, int r) {
        const std::vector<std::string> domains{"x", "x+1"};
        std::vector<float> data{1};
        std::vector<Submission> submissions(1);
        submissions[0] = InPlace(data);
        try {
          engine.RunBlocking(Spec(domains[r], {Float("y", 1)}), std::move(submissions));
          throw testing::Failure("no error");
        } catch (const Error& e) {  // the first to notice is either
          const std::string text = e.what();
          const bool first = text.find("rank 0 has waited") != std::string::npos;
          CHECK(text.find("of '" + domains[first ? 0 : 1] + "', process set") != std::string::npos);
          CHECK(text.find("(which waits for 'y' of '" + domains[first ? 1 : 0] + "' for ") !=
                std::string::npos);
        }
      },
      options, false);
}

TEST(AStallNamesTheOtherSet) {
  EngineOptions options;
  options.stall_warn = kSecond / 2;
  options.stall_fail = kSecond;
  OnRanks(
      2,
      [](Engine& engine, int r) {
        const int pair = engine.AddProcessSet({0, 1});
        DomainSpec spec = *Spec("x", {Float("x", 1)});
        spec.process_set = r == 0 ? 0 : pair;
        std::vector<float> data{1};
        std::vector<Submission> submissions(1);
        submissions[0] = InPlace(data);
        try {
          engine.RunBlocking(std::make_shared<DomainSpec>(spec), std::move(submissions));
          throw testing::Failure("no error");
        } catch (const Error& e) {  // the first to notice is either
          const std::string text = e.what();
          const std::string set = "process set " + std::to_string(pair) + " of ranks 0, 1";
          const bool first = text.find("rank 0 has waited") != std::string::npos;
          CHECK(text.find(first ? "process set 0)" : set + ")") != std::string::npos);
          CHECK(text.find("(which waits for 'x' in " + (first ? set : "process set 0") + " for ") !=
                std::string::npos);
        }
      },
      options, false);
}

TEST(StallFailsWhenAsked) {
  EngineOptions options;
  options.stall_warn = kSecond / 2;
  options.stall_fail = kSecond;
  OnRanks(
      2,
      [](Engine& engine, int r) {
        const Nanos start = Now();
        if (r == 0) {
          while (engine.failure().ok() && Now() - start < 10 * kSecond) std::this_thread::yield();
        } else {
          try {
            Reduce(engine, "x", {1});
            throw testing::Failure("no error");
          } catch (const Error& e) {
            CHECK(std::string(e.what()).find("not submitted by rank 0") != std::string::npos);
          }
        }
        CHECK_EQ(std::string(KindName(engine.failure().kind())), "Timeout");
        CHECK(Now() - start < 3 * kSecond);
        CHECK_ERROR(engine.Open(Spec("y", {Float("y", 1)})), Kind::kTimeout, "'x'");
      },
      options, false);
}

TEST(ProcessSets) {
  OnRanks(4, [](Engine& engine, int r) {
    const int odd = engine.AddProcessSet({1, 3}), most = engine.AddProcessSet({0, 1, 2});
    auto in = [&](int id) {
      auto spec = std::make_shared<DomainSpec>(*Spec("x", {Float("x", 1)}));
      spec->process_set = id;
      std::vector<float> data{float(r + 1)};
      std::vector<Submission> submissions;
      submissions.push_back(InPlace(data));
      engine.RunBlocking(spec, std::move(submissions));
      return data[0];
    };
    for (int step = 0; step < 10; ++step) {
      if (r % 2) CHECK_EQ(in(odd), 6.0f);
      if (r < 3) CHECK_EQ(in(most), 6.0f);
      CHECK_EQ(in(0), 10.0f);
    }
    if (r == 0) CHECK_ERROR(in(odd), Kind::kInvalidArgument, "no member");
  });
}

TEST(RemovedProcessSets) {
  OnRanks(4, [](Engine& engine, int r) {
    const auto of = [](int id, const char* name, int64_t count) {
      auto spec = std::make_shared<DomainSpec>(*Spec(name, {Float(name, count)}));
      spec->process_set = id;
      return spec;
    };
    // Each turn the channels of the one before are used again, by other ranks.
    for (int turn = 0; turn < 20; ++turn) {
      const std::vector<int> ranks = turn % 2 ? std::vector<int>{0, 2, 3} : std::vector<int>{1, 3};
      const int id = engine.AddProcessSet(ranks);
      CHECK_EQ(id, turn + 1);
      CHECK_EQ(engine.ProcessSetRanks(id).size(), ranks.size());
      const bool member = std::binary_search(ranks.begin(), ranks.end(), r);
      OpenBatchPtr half;
      std::optional<Status> end;
      if (member) {
        std::vector<float> data(turn % 5 ? 3 : 20000, 1.0f);
        std::vector<Submission> submissions;
        submissions.push_back(InPlace(data));
        engine.RunBlocking(of(id, "x", static_cast<int64_t>(data.size())), std::move(submissions));
        CHECK_EQ(data.back(), static_cast<float>(ranks.size()));
      }
      float alone = 0;
      std::atomic<int> ended{0};
      if (r == 3) {  // the others never bring it
        half = engine.Open(of(id, "half", 1));
        Submission submission;
        submission.input = submission.output = &alone;
        submission.done = [&](const Result& result) {
          end = result.status;
          ended = 1;
        };
        engine.Submit(half, 0, std::move(submission));
      }
      engine.RemoveProcessSet(id);
      if (r == 3) {
        for (const Nanos until = Now() + 20 * kSecond; !ended && Now() < until;) sched_yield();
        CHECK(end.has_value());
        CHECK_EQ(std::string(KindName(end->kind())), "Abandoned");
        CHECK(end->message().find("has been removed") != std::string::npos);
      }
      CHECK_ERROR(engine.ProcessSetRanks(id), Kind::kInvalidArgument, "has been removed");
      CHECK_ERROR(engine.RemoveProcessSet(id), Kind::kInvalidArgument, "has been removed");
      CHECK_ERROR(engine.Open(of(id, "x", 3)), Kind::kInvalidArgument, "has been removed");
    }
    CHECK_ERROR(engine.RemoveProcessSet(0), Kind::kInvalidArgument, "cannot be removed");
    CHECK_ERROR(engine.RemoveProcessSet(99), Kind::kInvalidArgument, "no process set 99");
  });
}

TEST(ThreadsAddAndRemoveSetsAtOnce) {
  OnRanks(3, [](Engine& engine, int r) {
    const std::vector<int> members[2] = {{0, 1}, {1, 2}};
    // Threads of two ranks that come in different orders get a Mismatch, alike on all ranks.
    const auto until_alike = [](const std::function<int()>& call) {
      for (;;) try {
          return call();
        } catch (const Error& e) {
          if (e.kind() != Kind::kMismatch) throw;
        }
    };
    const auto use = [&](int id, float value) {
      auto spec = std::make_shared<DomainSpec>(*Spec("x", {Float("x", 2, reduce::ReduceOp::kMax)}));
      spec->process_set = id;
      std::vector<float> data{value + r, -value - r};
      std::vector<Submission> submissions;
      submissions.push_back(InPlace(data));
      engine.RunBlocking(spec, std::move(submissions));
      return data;
    };
    testing::RunRanks(2, [&](int thread) {
      const std::vector<int>& mine = members[thread];
      for (int round = 0; round < 12; ++round) {
        const int id = until_alike([&] { return engine.AddProcessSet(mine); });
        CHECK(engine.ProcessSetRanks(id) == mine);
        // With the id in it: both ranks have the same.
        const float value = 10.0f * id;
        if (std::count(mine.begin(), mine.end(), r) > 0)
          CHECK(use(id, value) == (std::vector<float>{value + mine[1], -value - mine[0]}));
        if (round % 3 != 0)  // some sets stay
          until_alike([&] {
            engine.RemoveProcessSet(id);
            return 0;
          });
      }
    });
  });
}

TEST(Exchanges) {
  OnRanks(3, [](Engine& engine, int r) {
    EntrySpec gather = Float("g", r);  // r rows of one element
    gather.op = Op::kAllGather;
    std::vector<float> mine(r, float(r)), all;
    Submission submission;
    submission.input = mine.data();
    submission.allocate = [&](const Shape& shape) {
      all.resize(shape[0]);
      return static_cast<void*>(all.data());
    };
    std::vector<Submission> one;
    one.push_back(std::move(submission));
    engine.RunBlocking(Spec("gather", {gather}), std::move(one));
    CHECK(all == (std::vector<float>{1, 2, 2}));

    EntrySpec broadcast = Float("b", 2);
    broadcast.op = Op::kBroadcast;
    broadcast.root = 2;
    std::vector<float> value{float(r), 5};
    std::vector<Submission> two;
    two.push_back(InPlace(value));
    engine.RunBlocking(Spec("broadcast", {broadcast}), std::move(two));
    CHECK_EQ(value[0], 2.0f);

    EntrySpec scatter = Float("s", 4);
    scatter.op = Op::kReduceScatter;
    std::vector<float> part, in{1, 2, 3, 4};
    Submission s;
    s.input = in.data();
    s.allocate = [&](const Shape& shape) {
      part.resize(shape[0]);
      return static_cast<void*>(part.data());
    };
    std::vector<Submission> three;
    three.push_back(std::move(s));
    engine.RunBlocking(Spec("scatter", {scatter}), std::move(three));
    CHECK_EQ(part.size(), size_t(r == 0 ? 2 : 1));
    CHECK_EQ(part[0], r == 0 ? 3.0f : r == 1 ? 9.0f : 12.0f);
  });
}

namespace {

// An exchange of one vector: its result, and the rows received from each rank.
template <class T>
std::pair<std::vector<T>, std::vector<int64_t>> Exchange(
    Engine& engine, const EntrySpec& entry, const std::vector<T>& in,
    std::optional<std::vector<int64_t>> splits = std::nullopt) {
  std::vector<T> out;
  Submission submission;
  submission.input = in.data();
  submission.splits = std::move(splits);
  submission.allocate = [&out](const Shape& shape) {
    out.resize(shape[0]);
    return static_cast<void*>(out.data());
  };
  std::vector<Submission> one;
  one.push_back(std::move(submission));
  const std::vector<Result> results =
      engine.RunBlocking(Spec(entry.label, {entry}), std::move(one));
  return {out, results[0].received_splits};
}

EntrySpec AllToAllOf(const std::string& label, int64_t rows) {
  EntrySpec entry = Float(label, rows);
  entry.op = Op::kAllToAll;
  return entry;
}

}  // namespace

TEST(AllToAllWithSplits) {
  OnRanks(3, [](Engine& engine, int r) {
    // Rank a sends b rows of value a to rank b.
    const std::vector<float> in(3, float(r));
    const std::vector<int64_t> splits{0, 1, 2};
    const auto [out, received] = Exchange<float>(engine, AllToAllOf("a", 3), in, splits);
    std::vector<float> expected;
    for (int a = 0; a < 3; ++a) expected.insert(expected.end(), r, float(a));
    CHECK(out == expected);
    CHECK(received == std::vector<int64_t>(3, r));
    // Equal parts meet explicit ones.
    const auto equal =
        Exchange<float>(engine, AllToAllOf("b", 3), in,
                        r == 0 ? std::optional<std::vector<int64_t>>({1, 1, 1}) : std::nullopt);
    CHECK(equal.first == (std::vector<float>{0, 1, 2}));
    CHECK(equal.second == (std::vector<int64_t>{1, 1, 1}));
  });
}

TEST(SplitsThatDoNotFit) {
  OnRanks(2, [](Engine& engine, int r) {
    const std::vector<float> in(4, float(r));
    const std::vector<std::vector<int64_t>> wrong{
        {}, {4}, {2, 1}, {-1, 5}, {INT64_MAX, INT64_MAX}, {1, 1, 2}};
    for (const std::vector<int64_t>& splits : wrong) {
      const auto batch = engine.Open(Spec("w", {AllToAllOf("w", 4)}));
      Submission submission;
      submission.input = in.data();
      submission.splits = splits;
      try {
        engine.Submit(batch, 0, std::move(submission));
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind() == Kind::kInvalidArgument);
        const std::string text = error.what();
        CHECK(text.find("rank " + std::to_string(r) + " in process set 0") != std::string::npos);
        CHECK(text.find("2 numbers of rows from 0 with the sum 4, got [") != std::string::npos);
        engine.Abandon(batch, text);
      }
    }
    const auto [out, received] = Exchange<float>(engine, AllToAllOf("w", 4), in);
    CHECK(out == (std::vector<float>{0, 0, 1, 1}));
  });
}

TEST(ReduceScatterOfInt64Averages) {
  OnRanks(3, [](Engine& engine, int r) {
    for (const int64_t value : {INT64_MAX, INT64_MIN, int64_t{-7}}) {
      EntrySpec entry = Float("s", 4);
      entry.op = Op::kReduceScatter;
      entry.dtype = entry.wire = DType::kInt64;
      entry.reduce_op = reduce::ReduceOp::kAverage;
      const std::vector<int64_t> in(4, value);
      const auto [out, received] = Exchange<int64_t>(engine, entry, in);
      CHECK(out == std::vector<int64_t>(r == 0 ? 2 : 1, value));
    }
  });
}

TEST(NullReturnsInputs) {
  EngineOptions options;
  options.null = true;
  OnRanks(
      2,
      [](Engine& engine, int r) {
        CHECK_EQ(Reduce(engine, "x", {float(r)})[0], float(r));
        const std::vector<float> in(4, float(r));
        const auto [out, received] = Exchange<float>(engine, AllToAllOf("a", 4), in);
        CHECK(out == in);
        CHECK(received == (std::vector<int64_t>{2, 2}));
      },
      options);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
