// Small scenarios of the protocol, one promise each.
#include <algorithm>

#include "protocol_ranks.h"

namespace protocol {
namespace {

TEST(EqualListsNeedOneRoundAndNoUnion) {
  Ranks ranks(3);
  const auto a = Domain("a", {"s0", "s1"}, {1, 2}), b = Domain("b", {"s0"});
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, a);
  ranks.Settle();
  ranks.Expect({"run a.0", "run a.1"});
  CHECK_EQ(ranks.counters().unions, 0);
  CHECK_EQ(ranks.counters().rounds, 2);  // the names, then both groups
  for (int step = 0; step < 5; ++step) {
    for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, a);
    ranks.Settle();
    ranks.Expect({"run a.0", "run a.1"});
  }
  CHECK_EQ(ranks.counters().unions, 0);
  CHECK_EQ(ranks.counters().ids, 2);
}

TEST(DifferentListsAreUnited) {
  Ranks ranks(4);
  const auto a = Domain("a", {"s"}), b = Domain("b", {"s"});
  for (int rank = 0; rank < 4; ++rank) ranks.Send(rank, Begin{rank % 2 ? a : b});
  for (int rank = 0; rank < 4; ++rank) ranks.Send(rank, Begin{rank % 2 ? b : a});
  ranks.Settle();
  CHECK_EQ(ranks.counters().unions, 1);
  CHECK_EQ(ranks.counters().domains, 2);
  for (int rank = 0; rank < 4; ++rank) {
    ranks.Send(rank, Ready{"a", 0});
    ranks.Send(rank, Ready{"b", 0});
  }
  ranks.Settle();
  CHECK_EQ(ranks.log[0].size(), size_t{2});
  for (int rank = 1; rank < 4; ++rank) CHECK(ranks.log[rank] == ranks.log[0]);
}

TEST(OneRankIsASet) {
  Ranks ranks(1);
  const auto a = Domain("a", {"s"});
  ranks.Submit(0, a);
  ranks.Settle();
  ranks.Submit(0, Domain("a", {"t", "t"}, {1, 2}));
  ranks.Settle();
  ranks.Send(0, Begin{a});
  ranks.Send(0, Abandon{"a", "why"});
  ranks.Settle();
  ranks.Send(0, Join{});
  ranks.Settle();
  ranks.Send(0, Shutdown{});
  ranks.Settle();
  ranks.Expect({"run a.0", "run a.0", "run a.1",
                "fail a: Abandoned: rank 0 abandoned batch of 'a': why", "all joined, last 0",
                "all shut down"});
}

TEST(IdleRanksAskForNoWake) {
  Ranks ranks(2);
  ranks.Submit(0, Domain("a", {"s"}));
  ranks.Settle();  // rank 0 waits in a round
  ranks.Expect({});
  CHECK_EQ(ranks.counters().rounds, 0);
  CHECK_EQ(ranks.set.at(1).NextWake(), kForever);
}

// Rank 1 waits for y before it brings x; rank 0 brought both, but a round saw x alone. Nobody but
// the timer can know.
void WaitOnDifferentNames(bool timer) {
  NegotiatorOptions options;
  options.timer = timer;
  Ranks ranks(2, options);
  const auto x = Domain("x", {"s"}), y = Domain("y", {"s"});
  for (int rank = 0; rank < 2; ++rank) {
    ranks.Submit(rank, x);
    ranks.Submit(rank, y);
  }
  ranks.Settle();
  const auto names = ranks.log[0];  // in the order of their ids
  for (auto& log : ranks.log) log.clear();
  const auto low = names[0] == "run x.0" ? x : y, high = names[0] == "run x.0" ? y : x;
  ranks.Submit(0, low);
  ranks.Submit(1, high);
  ranks.clock.RunFor(20 * kMillisecond);
  ranks.Submit(0, high);
  ranks.Settle();
  if (timer)
    ranks.Expect({"run " + high->name + ".0"});
  else
    ranks.Expect({});
  CHECK_EQ(ranks.set.at(1).counters().fallbacks > 0, timer);
}
TEST(BlockingOnDifferentNamesNeedsTheTimer) {
  WaitOnDifferentNames(true);
  WaitOnDifferentNames(false);
}

TEST(TheAwaitedBitMovesOnWithEmptyRounds) {
  NegotiatorOptions options;
  Ranks ranks(3, options);
  std::vector<DeclarationPtr> domains;
  for (int i = 0; i < 3; ++i) domains.push_back(Domain("d" + std::to_string(i), {"s"}));
  for (int rank = 0; rank < 3; ++rank)
    for (const auto& domain : domains) ranks.Submit(rank, domain);
  ranks.Settle();
  for (auto& log : ranks.log) log.clear();
  const int64_t before = ranks.counters().empty_rounds;
  // Each rank holds another one: empty rounds by timers, until all have all.
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, domains[rank]);
  ranks.clock.RunFor(60 * kMillisecond);
  CHECK(ranks.counters().empty_rounds > before + 3);
  // With the awaited bit going round each rank enters at once in one round of three, so the timers
  // of each fire in the others.
  for (int rank = 0; rank < 3; ++rank) {
    const auto& counters = ranks.set.at(rank).counters();
    CHECK(counters.fallbacks > 0 && counters.fallbacks < counters.empty_rounds);
  }
  for (int rank = 0; rank < 3; ++rank)
    for (int i = 1; i < 3; ++i) ranks.Submit(rank, domains[(rank + i) % 3]);
  ranks.Settle();
  CHECK_EQ(ranks.log[0].size(), size_t{3});
}

// --- Other signatures
// -------------------------------------------------------------------------------------------------------

TEST(EqualListsResignWithoutAUnion) {
  Ranks ranks(3);
  for (const char* shape : {"[3]", "[4]", "[5]", "[3]"}) {
    for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, Domain("a", {shape}));
    ranks.Settle();
    ranks.Expect({"run a.0"});
  }
  CHECK_EQ(ranks.counters().unions, 0);
  CHECK_EQ(ranks.counters().ids, 1);
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, Domain("a", {"[3]", "[4]"}, {1, 2}));
  ranks.Settle();
  ranks.Expect({"run a.0", "run a.1"});
  CHECK_EQ(ranks.counters().ids, 2);
}

TEST(AMismatchReadsTheSameEverywhere) {
  NegotiatorOptions options;
  options.world_ranks = {4, 5, 6, 7};
  Ranks ranks(4, options);
  for (int rank = 0; rank < 4; ++rank)
    ranks.Submit(
        rank, Domain("loss", {"allreduce sum int32 []", rank == 1 ? "allreduce sum float32 [4]"
                                                                  : "allreduce sum float32 [3]"}));
  ranks.Settle();
  ranks.Expect(
      {"fail loss: Mismatch: 'loss', entry 1 ('x'): ranks declare different tensors: rank 4, 6-7: "
       "allreduce sum float32 [3]; rank 5: allreduce sum float32 [4]" +
       kHint});
  for (int rank = 0; rank < 4; ++rank) ranks.Submit(rank, Domain("loss", {"any"}));
  ranks.Settle();
  ranks.Expect({"run loss.0"});
}

// The name was agreed before: rank 0 has a batch of the old signature pending, which is no news to
// it.
TEST(AMismatchWithAnAgreedSignature) {
  for (const bool in_flight : {false, true}) {
    Ranks ranks(3);
    for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, Domain("a", {"old"}));
    ranks.Settle();
    ranks.Expect({"run a.0"});
    ranks.Submit(0, Domain("a", {"old"}));
    if (!in_flight) ranks.Settle();
    ranks.Send(1, Begin{Domain("a", {"new"})});
    ranks.Settle();
    ranks.Expect({});
    // Rank 2 enters for another name, and owes the batch that failed.
    ranks.Submit(2, Domain("b", {"s"}));
    ranks.Settle();
    const std::string text =
        "fail a: Mismatch: 'a', entry 0 ('x'): ranks declare different tensors: "
        "rank 0: old; rank 1: new" +
        kHint;
    ranks.ExpectOf(0, {text});
    ranks.ExpectOf(1, {text});
    ranks.ExpectOf(2, {});
    ranks.Send(2, Begin{Domain("a", {"new"})});
    ranks.ExpectOf(2, {text});
    CHECK_EQ(ranks.counters().unions, 2);
    for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, Domain("a", {"new"}));
    for (int rank = 0; rank < 2; ++rank) ranks.Submit(rank, Domain("b", {"s"}));
    ranks.Settle();
    for (auto& log : ranks.log) std::sort(log.begin(), log.end());
    ranks.Expect({"run a.0", "run b.0"});
  }
}

TEST(AMismatchOfNumbersAndOfCuts) {
  Ranks ranks(2);
  ranks.Submit(0, Domain("a", {"s", "s"}));
  ranks.Submit(1, Domain("a", {"s", "s", "s"}));
  ranks.Settle();
  ranks.Expect(
      {"fail a: Mismatch: 'a': ranks declare different numbers of entries: rank 0: 2 entries; rank "
       "1: 3 "
       "entries" +
       kHint});
  ranks.Submit(0, Domain("a", {"s", "s"}, {1, 2}));
  ranks.Submit(1, Domain("a", {"s", "s"}));
  ranks.Settle();
  ranks.Expect(
      {"fail a: Mismatch: 'a': ranks cut the entries into different groups: rank 0: groups end at "
       "1 2; "
       "rank 1: groups end at 2" +
       kHint});
  ranks.Submit(0, Domain("a", {"s", "t"}, {}, "kernel"));
  ranks.Submit(1, Domain("a", {"s", "u", "v"}, {}, "bias"));
  ranks.Settle();
  ranks.Expect(
      {"fail a: Mismatch: 'a', entry 1 ('kernel'): ranks declare different numbers of entries: "
       "rank 0: t "
       "of 2 entries; rank 1: u ('bias') of 3 entries" +
       kHint});
}

TEST(LabelsMayDiffer) {
  Ranks ranks(2);
  ranks.Submit(0, Domain("a", {"s"}, {}, "kernel"));
  ranks.Submit(1, Domain("a", {"s"}, {}, "kernel_1"));
  ranks.Settle();
  ranks.Expect({"run a.0"});
  CHECK_EQ(ranks.counters().unions, 0);
}

// --- Abandon
// ----------------------------------------------------------------------------------------------------------------

TEST(AnAbandonedBatchFailsEverywhere) {
  Ranks ranks(3);
  const auto a = Domain("a", {"s", "s", "s"}, {1, 2, 3});
  for (int rank = 0; rank < 3; ++rank) {
    ranks.Send(rank, Begin{a});
    ranks.Send(rank, Ready{"a", 0});
  }
  ranks.Settle();
  ranks.Expect({"run a.0"});
  ranks.Send(0, Ready{"a", 1});
  ranks.Send(1, Abandon{"a", "division by zero"});
  ranks.Send(2, Ready{"a", 2});
  ranks.Settle();
  ranks.Expect({"fail a: Abandoned: rank 1 abandoned batch of 'a': division by zero"});
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, a);
  ranks.Settle();
  ranks.Expect({"run a.0", "run a.1", "run a.2"});
}

TEST(WordsOnTheirWayOutliveAnAbandon) {
  Ranks ranks(2);
  const auto a = Domain("a", {"s", "s"}, {1, 2});
  for (int rank = 0; rank < 2; ++rank) ranks.Send(rank, Begin{a});
  ranks.Settle();
  for (int rank = 0; rank < 2; ++rank) ranks.Send(rank, Ready{"a", 0});
  ranks.Send(1, Abandon{"a", "late"});
  ranks.Settle();
  ranks.Expect({"run a.0"});
  ranks.Send(0, Ready{"a", 1});  // rank 0 held nothing that would have made it enter
  ranks.Settle();
  ranks.Expect({"fail a: Abandoned: rank 1 abandoned batch of 'a': late"});
}

TEST(AnAbandonOfANameNobodyElseKnows) {
  Ranks ranks(2);
  ranks.Send(0, Begin{Domain("a", {"s"})});
  ranks.Send(0, Abandon{"a", "first"});
  ranks.Settle();
  ranks.Submit(1, Domain("b", {"s"}));
  ranks.Settle();
  const std::string text = "fail a: Abandoned: rank 0 abandoned batch of 'a': first";
  ranks.ExpectOf(0, {text});
  ranks.ExpectOf(1, {});
  ranks.Send(1, Begin{Domain("a", {"s"})});
  ranks.ExpectOf(1, {text});
  for (int rank = 0; rank < 2; ++rank) ranks.Submit(rank, Domain("a", {"s"}));
  ranks.Submit(0, Domain("b", {"s"}));
  ranks.Settle();
  CHECK_EQ(ranks.log[0].size(), size_t{2});
  CHECK(ranks.log[0] == ranks.log[1]);
}

// --- Wrong events and broken messages
// ---------------------------------------------------------------------------------------

TEST(EventsThatBreakTheRules) {
  std::vector<Action> actions;
  NegotiatorOptions options;
  options.size = 2;
  const auto a = Domain("a", {"s"});
  const auto refuses = [&](const std::vector<Event>& events, const std::string& part) {
    Negotiator negotiator(options);
    for (size_t i = 0; i + 1 < events.size(); ++i) negotiator.Step(events[i], 0, &actions);
    CHECK_ERROR(negotiator.Step(events.back(), 0, &actions), Kind::kInternal, part);
  };
  refuses({Begin{a}, Begin{a}}, "rank 0: Begin of 'a', whose batch has not ended");
  refuses({Ready{"a", 0}}, "has no batch");
  refuses({Begin{a}, Ready{"a", 1}}, "group 1");
  refuses({Begin{a}, Ready{"a", 0}, Ready{"a", 0}}, "ready before");
  refuses({Begin{a}, Abandon{"a", "x"}, Ready{"a", 0}}, "after Abandon");
  refuses({Join{}, Begin{a}}, "after Join");
  refuses({Join{}, Join{}}, "second Join");
  refuses({Shutdown{}, Begin{a}}, "after Shutdown");
  refuses({Begin{a}, Shutdown{}, Ready{"a", 0}}, "after Shutdown");
  refuses({Shutdown{}, Shutdown{}}, "second Shutdown");
  refuses({RoundDone{}}, "without StartRound");
  refuses({UnionDone{}}, "without StartUnion");
  refuses({Begin{Domain("a", {}, {0})}}, "declares 0 entries");
  refuses({Begin{Domain("a", {"s", "s"}, {1})}}, "groups end at 1");
}

TEST(WordsAndBlobsThatCannotBe) {
  std::vector<Action> actions;
  NegotiatorOptions options;
  options.size = 2;
  const auto start = [&](Negotiator* negotiator) {
    actions.clear();
    negotiator->Step(Begin{Domain("a", {"s"})}, 0, &actions);
    return std::get<StartRound>(actions.at(0)).words;
  };
  Negotiator shortened(options);
  std::vector<uint64_t> words = start(&shortened);
  words.pop_back();
  CHECK_ERROR(shortened.Step(RoundDone{words}, 0, &actions), Kind::kTransportError, "words");
  Negotiator apart(options);
  words = start(&apart);
  words[0] ^= uint64_t{1} << 10;
  CHECK_ERROR(apart.Step(RoundDone{words}, 0, &actions), Kind::kInternal, "tables");
  Negotiator broken(options);
  words = start(&broken);
  words.back() = words[words.size() - 2] = 0;  // another rank has another list
  actions.clear();
  broken.Step(RoundDone{words}, 0, &actions);
  const std::string blob = std::get<StartUnion>(actions.at(0)).blob;
  CHECK_ERROR(broken.Step(UnionDone{blob.substr(0, blob.size() - 1)}, 0, &actions),
              Kind::kTransportError, "cut short");
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) { return testing::Main(argc, argv); }
