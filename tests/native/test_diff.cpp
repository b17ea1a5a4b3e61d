// Contexts and operations of differentiable communication, on loopback ranks.
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "comm/loopback/world.h"
#include "diff/context.h"
#include "faulty_transport.h"
#include "ranks.h"
#include "testing.h"

using namespace gradred;
using diff::Context;
using diff::Dims;
using testing::RunRanks;

namespace {

constexpr std::chrono::seconds kLimit(30);
using Values = std::vector<double>;

// A call on float64 inputs whose outputs are float64, or int64 where they are numbers.
class ArrayCall final : public diff::Call {
 public:
  struct Result {
    Status status;
    std::vector<Values> outputs;
    std::vector<Dims> shapes;
  };

  void Add(Values values, Dims shape) {
    arrays_.push_back(std::make_unique<Values>(std::move(values)));
    inputs_.push_back({arrays_.back()->data(), DType::kFloat64, std::move(shape)});
  }
  void AddNumbers(std::vector<int64_t> numbers) {
    numbers_.push_back(std::make_unique<std::vector<int64_t>>(std::move(numbers)));
    const auto n = static_cast<int64_t>(numbers_.back()->size());
    inputs_.push_back({numbers_.back()->data(), DType::kInt64, {n}});
  }
  std::future<Result> future() { return promise_.get_future(); }

  const diff::Inputs& inputs() const override { return inputs_; }
  void* Output(int index, const Dims& shape) override {
    Reserve(index);
    result_.outputs[index].resize(diff::CountOf(shape));
    result_.shapes[index] = shape;
    return result_.outputs[index].data();
  }
  void Forward(int index, int input) override {
    Reserve(index);
    result_.outputs[index] = *arrays_.at(input);
    result_.shapes[index] = inputs_.at(input).shape;
  }
  void Done(const Status& status, bool) override {
    result_.status = status;
    promise_.set_value(std::move(result_));
  }

 private:
  void Reserve(int index) {
    if (static_cast<int>(result_.outputs.size()) <= index) {
      result_.outputs.resize(index + 1);
      result_.shapes.resize(index + 1);
    }
  }
  diff::Inputs inputs_;
  std::vector<std::unique_ptr<Values>> arrays_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> numbers_;
  Result result_;
  std::promise<Result> promise_;
};

std::unique_ptr<diff::Operation> Make(const std::string& name, const diff::Params& params = {}) {
  return diff::Operations().at(name)(params);
}

ArrayCall::Result Run(Context& context, const std::string& name, diff::Operation& operation,
                      std::unique_ptr<ArrayCall> call) {
  auto future = call->future();
  context.Submit(&operation, name, std::move(call));
  if (future.wait_for(kLimit) != std::future_status::ready)
    throw testing::Failure(name + " did not finish");
  return future.get();
}

ArrayCall::Result Run(Context& context, const std::string& name, const diff::Params& params,
                      std::unique_ptr<ArrayCall> call) {
  return Run(context, name, *Make(name, params), std::move(call));
}

ArrayCall::Result Run(Context& context, const std::string& name, const diff::Params& params,
                      const Values& values, const Dims& shape) {
  auto call = std::make_unique<ArrayCall>();
  call->Add(values, shape);
  return Run(context, name, params, std::move(call));
}

struct Rank {
  comm::World& world;
  std::shared_ptr<diff::Traffic> traffic;
  std::unique_ptr<Context> Open(int id, const std::string& name, std::vector<int> members,
                                int checks = -1, diff::Limits limits = {}) {
    diff::ContextOptions options;
    options.id = id;
    options.name = name;
    options.members = std::move(members);
    options.checks = checks;
    options.limits = limits;
    return std::make_unique<Context>(world, traffic, std::move(options));
  }
};

std::vector<int> Everybody(int size) {
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return members;
}

void OnRanks(int size, const std::function<void(Rank&, int)>& body, int virtual_nodes = 1) {
  comm::LoopbackOptions options;
  options.virtual_nodes = virtual_nodes;
  options.hierarchical = virtual_nodes > 1;
  const auto worlds = comm::MakeLoopbackWorlds(size, options);
  RunRanks(size, [&](int r) {
    Rank rank{*worlds[r], std::make_shared<diff::Traffic>(worlds[r]->diff())};
    body(rank, r);
    worlds[r]->Close();
  });
}

}  // namespace

TEST(OperationsReturnWhatTheyShould) {
  for (const int size : {1, 2, 3, 4, 5}) {
    OnRanks(
        size,
        [&](Rank& rank, int r) {
          const auto context = rank.Open(0, "all", Everybody(size));
          const double total = size * (size + 1) / 2;
          const Values mine{1.0 + r, 2.0 * (1 + r)};
          CHECK(Run(*context, "allreduce", {0}, mine, {2}).outputs[0] ==
                Values({total, 2 * total}));
          CHECK(Run(*context, "allreduce", {4}, mine, {2}).outputs[0][0] == total / size);
          const double before = (r + 1) * (r + 2) / 2;
          CHECK(Run(*context, "scan", {1}, mine, {2}).outputs[0] == Values({before, 2 * before}));
          const double behind = total - before + 1 + r;
          CHECK(Run(*context, "scan", {-1}, mine, {2}).outputs[0] == Values({behind, 2 * behind}));
          CHECK(Run(*context, "broadcast", {size - 1}, mine, {2}).outputs[0][0] == size);
          const auto reduced = Run(*context, "reduce", {0}, mine, {2});
          CHECK(reduced.outputs[0][0] == (r == 0 ? total : 0));
          // r + 1 rows from rank r.
          const auto gathered =
              Run(*context, "allgather", {}, Values(r + 1, r), {static_cast<int64_t>(r) + 1, 1});
          Values expected;
          for (int s = 0; s < size; ++s) expected.insert(expected.end(), s + 1, s);
          CHECK(gathered.outputs[0] == expected);
          auto scattered = std::make_unique<ArrayCall>();
          const auto rows = static_cast<int64_t>(total);
          scattered->Add(expected, {rows, 1});
          scattered->AddNumbers({r + 1});
          CHECK(Run(*context, "reduce_scatter", {}, std::move(scattered)).outputs[0] ==
                Values(r + 1, r * size));
          auto moved = std::make_unique<ArrayCall>();
          moved->Add(mine, {2});
          moved->Add({0, 0}, {2});
          const int next = (r + 1) % size, previous = (r + size - 1) % size;
          CHECK(Run(*context, "sendrecv", {next, previous}, std::move(moved)).outputs[0][0] ==
                1.0 + previous);
          CHECK(Run(*context, "barrier", {}, std::make_unique<ArrayCall>()).status.ok());
        },
        size > 2 ? 2 : 1);
  }
}

TEST(RanksThatDifferGetOneText) {
  OnRanks(3, [&](Rank& rank, int r) {
    const auto context = rank.Open(0, "all", Everybody(3));
    const auto shape = Run(*context, "allreduce", {0}, Values(2 + r / 2), {2 + r / 2});
    CHECK_EQ(shape.status.message(),
             "operation 0 of context 'all': the ranks differ: ranks 0, 1: allreduce(sum) of "
             "float64 [2]; rank 2: allreduce(sum) of float64 [3]");
    const auto kind = Run(*context, r == 0 ? "allgather" : "scan", {1}, {1}, {1});
    CHECK_EQ(kind.status.message(),
             "operation 1 of context 'all': the ranks differ: rank 0: allgather of rows of "
             "float64 []; ranks 1, 2: scan of float64 [1]");
    auto wrong = std::make_unique<ArrayCall>();
    wrong->Add({1, 2, 3}, {3});
    wrong->AddNumbers(r == 1 ? std::vector<int64_t>{4} : std::vector<int64_t>{1, 1, 1});
    const auto refused = Run(*context, "alltoall", {}, std::move(wrong));
    CHECK(refused.status.kind() == Kind::kInvalidArgument);
    CHECK_EQ(refused.status.message(),
             "operation 2 of context 'all': rank 1: alltoall: expected as splits 3 numbers from 0 "
             "with the sum 3, got [4]");
    CHECK(Run(*context, "allreduce", {0}, {1}, {1}).outputs[0][0] == 3);
  });
}

TEST(WhatOneRankFindsEndsTheContextOnAll) {
  OnRanks(3, [&](Rank& rank, int r) {
    const auto context = rank.Open(0, "all", Everybody(3)),
               other = rank.Open(1, "other", {0, 1, 2});
    if (r == 0) Run(*context, "send", {1}, Values(4), {4});
    if (r == 1) {
      const auto got = Run(*context, "recv", {0}, Values(2), {2});
      CHECK(got.status.kind() == Kind::kMismatch);
    }
    const auto then = Run(*context, "barrier", {}, std::make_unique<ArrayCall>());
    CHECK_EQ(
        then.status.message(),
        "rank 1 of context 'all': a message from rank 0: expected float64 [2], got 4 elements of "
        "float64");
    CHECK(Run(*other, "allreduce", {0}, {1}, {1}).outputs[0][0] == 3);
  });
}

TEST(ContextsMayBeUsedInDifferentOrders) {
  constexpr int kRounds = 50;
  OnRanks(4, [&](Rank& rank, int r) {
    const auto all = rank.Open(0, "all", Everybody(4));
    const auto pair = rank.Open(1, "pair", {r / 2 * 2, r / 2 * 2 + 1});
    const auto use = [&](Context& context, double expected) {
      for (int i = 0; i < kRounds; ++i)
        CHECK(Run(context, "allreduce", {0}, {1}, {1}).outputs[0][0] == expected);
    };
    auto later = std::async(std::launch::async, [&] { r % 2 == 0 ? use(*all, 4) : use(*pair, 2); });
    r % 2 == 0 ? use(*pair, 2) : use(*all, 4);
    later.get();
  });
}

// A rank may leave as soon as it has its own results: the others still get theirs.
TEST(LeavingAfterTheLastOperationHurtsNobody) {
  for (int round = 0; round < 30; ++round) {
    OnRanks(4, [&](Rank& rank, int r) {
      const auto context = rank.Open(0, "all", Everybody(4));
      for (int i = 0; i < 3; ++i) {
        const auto gathered = Run(*context, "allgather", {}, Values(100, r), {100});
        CHECK_EQ(gathered.status.message(), "");
        CHECK(gathered.outputs[0].size() == 400);
      }
      context->Close("it has all it wants");
      const auto late = Run(*context, "barrier", {}, std::make_unique<ArrayCall>());
      CHECK(late.status.kind() == Kind::kAbandoned);
    });
  }
}

TEST(LeavingBeforeAnOperationEndsIt) {
  OnRanks(3, [&](Rank& rank, int r) {
    const auto context = rank.Open(0, "all", Everybody(3));
    if (r == 2) return context->Close("enough");
    const auto missed = Run(*context, "allreduce", {0}, {1}, {1});
    CHECK(missed.status.kind() == Kind::kAbandoned);
    CHECK_EQ(missed.status.message(), "rank 2 has left context 'all': enough");
  });
}

// Of messages too, however late they come: who leaves has none of them.
TEST(MessagesOfOthersGoOnWhenARankLeaves) {
  std::promise<void> left;
  const auto after = left.get_future().share();
  OnRanks(3, [&](Rank& rank, int r) {
    const auto context = rank.Open(0, "all", Everybody(3));
    if (r == 2) {
      CHECK(Run(*context, "send", {1}, Values{7}, {1}).status.ok());
      context->Close("it has sent what it had");
      left.set_value();
      return;
    }
    if (r == 1) {  // waits before and while rank 2 leaves
      for (const double sent : {1.0, 2.0})
        CHECK(Run(*context, "recv", {0}, Values(1), {1}).outputs[0][0] == sent);
      CHECK(Run(*context, "recv", {2}, Values(1), {1}).outputs[0][0] == 7);
      const auto missed = Run(*context, "recv", {2}, Values(1), {1});
      CHECK_EQ(missed.status.message(), "rank 2 has left context 'all': it has sent what it had");
      return;
    }
    CHECK(Run(*context, "send", {1}, Values{1}, {1}).status.ok());
    CHECK(after.wait_for(kLimit) == std::future_status::ready);
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    CHECK(Run(*context, "send", {1}, Values{2}, {1}).status.ok());
  });
}

namespace {

// Computes on the last rank between two meetings.
class Slow final : public diff::Operation {
 public:
  diff::Terms TermsOf(const diff::Inputs&, const diff::Channel&) const override {
    return {"slow", {}};
  }
  void Run(diff::Call&, diff::Channel& channel, const diff::Numbers&) override {
    channel.Barrier();
    if (channel.rank() == channel.size() - 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
    channel.Barrier();
  }
};

}  // namespace

TEST(ARankThatComputesIsNotLost) {
  OnRanks(3, [&](Rank& rank, int) {
    diff::Limits limits;
    limits.transport_timeout = 20 * kMillisecond;
    const auto context = rank.Open(0, "all", Everybody(3), -1, limits);
    Slow slow;
    CHECK_EQ(Run(*context, "slow", slow, std::make_unique<ArrayCall>()).status.message(), "");
    CHECK(Run(*context, "allreduce", {0}, {1}, {1}).outputs[0][0] == 3);
  });
}

TEST(RanksThatAllWaitEndWithOneText) {
  OnRanks(3, [&](Rank& rank, int r) {
    diff::Limits limits;
    limits.transport_timeout = 100 * kMillisecond;
    const auto context = rank.Open(0, "all", Everybody(3), -1, limits);
    if (r == 2) return context->Close("it does not take part");
    const auto stuck = Run(*context, "recv", {1 - r}, Values(1), {1});
    CHECK(stuck.status.kind() == Kind::kTimeout);
    CHECK_EQ(stuck.status.message(),
             "context 'all': all ranks wait, and nothing moves any more: ranks 0, 1: recv in "
             "context 'all'");
  });
}

TEST(WhatOneRankRefusesFailsOnAll) {
  OnRanks(3, [&](Rank& rank, int r) {
    const auto context = rank.Open(0, "all", Everybody(3)),
               other = rank.Open(1, "other", Everybody(3));
    const std::string why = "psum: expected a number, got a word";
    if (r == 1) {
      context->Refuse("psum", why, true);
    } else {
      const auto result = Run(*context, "allreduce", {0}, {1}, {1});
      CHECK(result.status.kind() == Kind::kInvalidArgument);
      CHECK_EQ(result.status.message(), "operation 0 of context 'all': rank 1: " + why);
    }
    CHECK(Run(*context, "allreduce", {0}, {1}, {1}).outputs[0][0] == 3);
    // Who is not through yet would lose that result.
    CHECK(Run(*other, "barrier", {}, std::make_unique<ArrayCall>()).status.ok());
    if (r == 1) context->Refuse("recv", "recv: expected a rank, got a word", false);
    const auto ended = Run(*context, "allreduce", {0}, {1}, {1});
    CHECK_EQ(ended.status.message(),
             "rank 1: recv in context 'all': recv: expected a rank, got a word");
  });
}

// Where terms are not compared any more, who refuses tells the others.
TEST(WhatOneRankRefusesIsNamedWithoutComparisons) {
  for (const bool collective : {false, true}) {
    OnRanks(3, [&](Rank& rank, int r) {
      const auto context = rank.Open(0, "all", Everybody(3), 0);
      const std::string why = "psum in context 'all': expected a number, got a word";
      if (r == 1) context->Refuse("psum", why, collective);
      const auto ended = Run(*context, "allreduce", {0}, {1}, {1});
      CHECK(ended.status.kind() == Kind::kInvalidArgument);
      CHECK_EQ(ended.status.message(), "rank 1: " + why);
    });
  }
}

// Rank 0 leaves while a message with rank 1 is under way, which is not to wait for it.
TEST(LeavingInTheMiddleOfAMessageEndsIt) {
  for (const bool sends : {true, false}) {
    std::promise<void> left;
    const auto after = left.get_future().share();
    const auto worlds = comm::MakeLoopbackWorlds(2);
    RunRanks(2, [&](int r) {
      testing::Faults faults;
      // Of the second operation: two messages each, the header and what it is about.
      if (sends == (r == 0)) faults.stuck_send = sends ? 3 : 2;
      testing::FaultyTransport transport(worlds[r]->diff(), faults);
      const auto traffic = std::make_shared<diff::Traffic>(transport);
      const auto context = Rank{*worlds[r], traffic}.Open(0, "all", {0, 1});
      const std::string mine = sends == (r == 0) ? "send" : "recv";
      CHECK(Run(*context, mine, {1 - r}, Values{7}, {1}).status.ok());
      std::string text;
      if (r == 0) {
        auto call = std::make_unique<ArrayCall>();
        call->Add(Values(3), {3});
        auto stuck = call->future();
        const auto operation = Make(mine, {1});
        context->Submit(operation.get(), mine, std::move(call));
        const auto begun = [&] { return sends ? transport.sends() > 3 : transport.receives() > 2; };
        while (!traffic->Locked(begun)) std::this_thread::yield();
        context->Close("it was interrupted");
        left.set_value();
        text = stuck.get().status.message();
      } else {
        if (!sends) CHECK(after.wait_for(kLimit) == std::future_status::ready);
        text = Run(*context, mine, {0}, Values(3), {3}).status.message();
      }
      CHECK_EQ(text, "rank 0 has left context 'all': it was interrupted");
      worlds[r]->Close();
    });
  }
}

TEST(AbortEndsWhatWaits) {
  const auto worlds = comm::MakeLoopbackWorlds(2);
  Rank rank{*worlds[0], std::make_shared<diff::Traffic>(worlds[0]->diff())};
  const auto context = rank.Open(0, "all", {0, 1});
  auto aborted = std::async(std::launch::async,
                            [&] { worlds[0]->Abort({Kind::kPeerLost, "rank 1 is gone"}); });
  const auto result = Run(*context, "allreduce", {0}, {1}, {1});
  aborted.get();
  CHECK(result.status.kind() == Kind::kPeerLost);
  CHECK(result.status.message().find("rank 1 is gone") != std::string::npos);
}

TEST(BlocksMoveBetweenAnyPartitions) {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 10; ++round) {
    const int size = 1 + random() % 4;
    const int64_t rows = random() % 9, columns = 1 + random() % 5;
    // Before: rows cut anywhere; after: columns.
    const auto cuts = [&](int64_t n) {
      std::vector<int64_t> at{0, n};
      for (int i = 1; i < size; ++i) at.push_back(random() % (n + 1));
      std::sort(at.begin(), at.end());
      return at;
    };
    const auto by_row = cuts(rows), by_column = cuts(columns);
    diff::Params params{2}, back{2};
    for (int r = 0; r < size; ++r) {
      const diff::Params old{by_row[r], 0, by_row[r + 1], columns};
      const diff::Params now{0, by_column[r], rows, by_column[r + 1]};
      for (const auto* part : {&old, &now}) params.insert(params.end(), part->begin(), part->end());
      for (const auto* part : {&now, &old}) back.insert(back.end(), part->begin(), part->end());
    }
    OnRanks(size, [&](Rank& rank, int r) {
      const auto context = rank.Open(0, "all", Everybody(size));
      Values mine, expected;
      for (int64_t i = by_row[r]; i < by_row[r + 1]; ++i)
        for (int64_t j = 0; j < columns; ++j) mine.push_back(i * columns + j);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = by_column[r]; j < by_column[r + 1]; ++j)
          expected.push_back(i * columns + j);
      const Dims shape{by_row[r + 1] - by_row[r], columns};
      const auto moved = Run(*context, "repartition", params, mine, shape);
      CHECK_EQ(moved.status.message(), "");
      CHECK(moved.outputs[0] == expected);
      CHECK(Run(*context, "repartition", back, expected, moved.shapes[0]).outputs[0] == mine);
    });
  }
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
