// Ranks that join or shut down while others go on.
#include <algorithm>

#include "protocol_ranks.h"

namespace protocol {
namespace {

const auto kA = Domain("a", {"s"});
const auto kB = Domain("b", {"s"});

TEST(AJoinedRankSuppliesZeros) {
  Ranks ranks(3);
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, kA);
  ranks.Settle();
  ranks.Expect({"run a.0"});
  ranks.Send(1, Join{});
  for (int step = 0; step < 3; ++step) {
    for (const int rank : {0, 2}) ranks.Submit(rank, kA);
    ranks.Settle();
    for (const int rank : {0, 2}) ranks.ExpectOf(rank, {"run a.0 joined"});
    ranks.ExpectOf(1, {"zeros a.0 joined"});
  }
  // A name that rank 1 has never heard of comes with its text.
  for (const int rank : {0, 2}) ranks.Submit(rank, kB);
  ranks.Settle();
  ranks.ExpectOf(1, {"zeros b.0 joined"});
  CHECK_EQ(ranks.payloads.at("b"), "payload of b");
  ranks.Send(2, Join{});
  ranks.Send(0, Join{});
  ranks.Settle();
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.log[rank].back(), "all joined, last 2");
  for (auto& log : ranks.log) log.clear();
  // Numbers of batches agree again.
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, kA);
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

TEST(TheLastToJoinIsNamed) {
  Ranks ranks(3);
  for (const int rank : {2, 0, 1}) {
    ranks.Send(rank, Join{});
    ranks.Settle();
  }
  ranks.Expect({"all joined, last 2"});  // nobody entered before: one round saw them all
  ranks.Send(2, Join{});
  for (const int rank : {0, 1}) ranks.Submit(rank, kA);
  ranks.Settle();
  for (const int rank : {0, 1}) ranks.Send(rank, Join{});
  ranks.Settle();
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(ranks.log[rank].back(), "all joined, last 1");
}

TEST(AJoinWaitsForTheBatchesOfItsRank) {
  Ranks ranks(2);
  const auto two = Domain("two", {"s", "s"}, {1, 2});
  ranks.Send(0, Begin{two});
  ranks.Send(0, Ready{"two", 0});
  ranks.Send(0, Join{});
  ranks.Send(1, Join{});
  ranks.Settle();
  for (auto& log : ranks.log) log.clear();
  ranks.Send(0, Ready{"two", 1});
  ranks.Settle();
  CHECK_EQ(ranks.log[0].back(), "all joined, last 0");
  CHECK_EQ(ranks.log[1].back(), "all joined, last 0");
  CHECK(std::count(ranks.log[1].begin(), ranks.log[1].end(), "zeros two.1 joined") == 1);
}

// Begin, Ready and Join all come while a round of another name is on its way: the join is over only
// after the batch.
TEST(AJoinAndANewNameInOneRound) {
  Ranks ranks(2);
  ranks.Submit(0, kA);
  ranks.Submit(1, kA);
  ranks.Submit(0, kB);
  ranks.Send(0, Join{});
  ranks.Send(1, Join{});
  ranks.Settle();
  ranks.ExpectOf(0, {"run a.0 joined", "run b.0 joined", "all joined, last 1"});
  ranks.ExpectOf(1, {"run a.0 joined", "zeros b.0 joined", "all joined, last 1"});
}

TEST(AnAbandonWhileARankHasJoined) {
  Ranks ranks(3);
  ranks.Send(2, Join{});
  for (const int rank : {0, 1}) ranks.Send(rank, Begin{kA});
  ranks.Settle();
  ranks.Send(0, Abandon{"a", "x"});
  ranks.Send(1, Ready{"a", 0});
  ranks.Settle();
  for (const int rank : {0, 1})
    ranks.ExpectOf(rank, {"fail a: Abandoned: rank 0 abandoned batch of 'a': x"});
  for (const int rank : {0, 1}) ranks.Send(rank, Join{});
  ranks.Settle();
  ranks.Expect({"all joined, last 1"});
  // Rank 2 owes nothing for the batch that it was no part of.
  for (int rank = 0; rank < 3; ++rank) ranks.Submit(rank, kA);
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

TEST(AnOwedFailureEndsWithTheJoin) {
  Ranks ranks(2);
  ranks.Send(0, Begin{kA});
  ranks.Send(0, Abandon{"a", "x"});
  ranks.Settle();
  ranks.Submit(1, kB);
  ranks.Settle();
  ranks.Submit(0, kB);
  ranks.Settle();
  for (auto& log : ranks.log) log.clear();
  for (const int rank : {0, 1}) ranks.Send(rank, Join{});
  ranks.Settle();
  ranks.Expect({"all joined, last 1"});
  for (const int rank : {0, 1}) ranks.Submit(rank, kA);
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

// A joined rank has a batch of another signature pending: it must not pass for zeros.
TEST(AJoinedRankWithAnotherSignature) {
  Ranks ranks(2);
  for (const int rank : {0, 1}) ranks.Submit(rank, kA);
  ranks.Settle();
  ranks.Expect({"run a.0"});
  ranks.Submit(0, kB);  // enters, so that the rest of rank 0 comes in one round
  ranks.Submit(0, Domain("a", {"other"}));
  ranks.Send(0, Join{});
  ranks.Submit(1, kA);
  ranks.Settle();
  ranks.Send(1, Join{});
  ranks.Settle();
  const std::string text =
      "fail a: Mismatch: 'a', entry 0 ('x'): ranks declare different tensors: "
      "rank 0: other; rank 1: s" +
      kHint;
  ranks.ExpectOf(0, {text, "run b.0 joined", "all joined, last 1"});
  ranks.ExpectOf(1, {text, "zeros b.0 joined", "all joined, last 1"});
}

// --- Shutdown
// ---------------------------------------------------------------------------------------------------------------

TEST(ShutdownOfAll) {
  Ranks ranks(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.Submit(rank, kA);
    ranks.Send(rank, Shutdown{"done"});
  }
  ranks.Settle();
  // The first rank was on its way with the name alone; all had submitted the batch whole.
  ranks.Expect({"run a.0", "all shut down"});
  CHECK_EQ(ranks.set.at(0).NextWake(), kForever);
}

TEST(BatchesAfterAShutdownFail) {
  Ranks ranks(3);
  ranks.Submit(0, kA);
  ranks.Send(2, Begin{kB});
  ranks.Send(1, Shutdown{"the program is over"});
  ranks.Settle();
  const std::string text = ": Abandoned: rank 1 has shut down: the program is over";
  ranks.ExpectOf(0, {"fail a" + text});
  ranks.ExpectOf(2, {"fail b" + text});
  ranks.ExpectOf(1, {});
  ranks.Send(2, Shutdown{"another reason"});
  ranks.Settle();
  ranks.Send(0, Begin{kB});
  ranks.Send(0, Begin{Domain("c", {"s"})});
  ranks.ExpectOf(0, {"fail b" + text, "fail c" + text});
  ranks.Send(0, Shutdown{""});
  ranks.Settle();
  ranks.Expect({"all shut down"});
}

TEST(WhatWasSubmittedWholeBeforeAShutdownRuns) {
  Ranks ranks(3);
  const auto two = Domain("two", {"s", "s"}, {1, 2});
  ranks.Submit(1, two);
  ranks.Send(1, Begin{kB});  // not whole
  ranks.Send(1, Shutdown{"over"});
  ranks.Settle();
  for (const int rank : {0, 2}) ranks.Send(rank, Begin{two});
  for (const int rank : {0, 2}) ranks.Send(rank, Begin{kB});
  ranks.Settle();
  const std::string b = "fail b: Abandoned: rank 1 has shut down: over";
  ranks.Expect({b});
  for (const int group : {1, 0})
    for (const int rank : {2, 0}) {
      ranks.Send(rank, Ready{"two", group});
      ranks.Settle();
    }
  ranks.Expect({"run two.1", "run two.0"});
  ranks.Send(0, Begin{two});
  ranks.ExpectOf(0, {"fail two: Abandoned: rank 1 has shut down: over"});
  for (const int rank : {0, 2}) ranks.Send(rank, Shutdown{});
  ranks.Settle();
  ranks.Expect({"all shut down"});
}

// The batch that rank 0 had submitted whole fails in the union that also brings its shutdown: its
// next one cannot come.
TEST(AShutdownAndAnAbandonInOneUnion) {
  Ranks ranks(3);
  for (int rank = 0; rank < 3; ++rank) ranks.Send(rank, Begin{kA});
  ranks.Settle();
  ranks.Send(0, Ready{"a", 0});
  ranks.Send(0, Shutdown{"over"});
  ranks.Send(1, Abandon{"a", "x"});
  ranks.Send(2, Ready{"a", 0});
  ranks.Settle();
  // Rank 0 was on its way before its Shutdown, and brings it to the same union.
  ranks.Expect({"fail a: Abandoned: rank 1 abandoned batch of 'a': x"});
  ranks.Send(1, Begin{kA});
  ranks.Settle();
  ranks.ExpectOf(1, {"fail a: Abandoned: rank 0 has shut down: over"});
}

TEST(TwoShutdownsWithOnePendingBatch) {
  Ranks ranks(3);
  ranks.Submit(0, kA);
  ranks.Send(0, Shutdown{"first"});
  ranks.Submit(1, kA);
  ranks.Send(2, Begin{kB});
  ranks.Settle();
  ranks.ExpectOf(0, {});
  ranks.ExpectOf(1, {});
  ranks.ExpectOf(2, {"fail b: Abandoned: rank 0 has shut down: first"});
  ranks.Send(2, Shutdown{"second"});
  ranks.Settle();
  for (const int rank : {0, 1})
    ranks.ExpectOf(rank, {"fail a: Abandoned: rank 2 has shut down: second"});
  ranks.Send(1, Shutdown{});
  ranks.Settle();
  ranks.Expect({"all shut down"});
}

TEST(AShutdownWhileOthersJoined) {
  Ranks ranks(3);
  ranks.Send(0, Join{});
  ranks.Send(2, Shutdown{"over"});
  ranks.Submit(1, kA);
  ranks.Settle();
  ranks.ExpectOf(1, {"fail a: Abandoned: rank 2 has shut down: over"});
  ranks.Send(1, Join{});
  ranks.Settle();
  ranks.ExpectOf(0, {"all joined, last 1"});
  ranks.ExpectOf(1, {"all joined, last 1"});
  ranks.ExpectOf(2, {});
  ranks.Send(0, Shutdown{});  // after a join of its own
  ranks.Send(1, Join{});
  ranks.Settle();
  ranks.ExpectOf(1, {"all joined, last 1"});
  ranks.Send(1, Shutdown{});
  ranks.Settle();
  ranks.Expect({"all shut down"});
}

TEST(AJoinedRankShutsDown) {
  Ranks ranks(2);
  ranks.Send(0, Join{});
  ranks.Submit(1, kA);
  ranks.Settle();
  ranks.ExpectOf(0, {"zeros a.0 joined"});
  ranks.ExpectOf(1, {"run a.0 joined"});
  ranks.Send(0, Shutdown{"gave up"});
  ranks.Submit(1, kA);
  ranks.Settle();
  ranks.Submit(1, kA);
  const std::string text = "fail a: Abandoned: rank 0 has shut down: gave up";
  ranks.Settle();
  ranks.ExpectOf(1, {"run a.0 joined", text});
}

// --- What ended is awaited by nobody
// ----------------------------------------------------------------------------------------

// Two names that all ranks know, the one with the lower id first; no timer, which would hide the
// fault.
std::pair<DeclarationPtr, DeclarationPtr> TwoKnownNames(Ranks* ranks) {
  for (int rank = 0; rank < ranks->set.size(); ++rank) {
    ranks->Submit(rank, kA);
    ranks->Submit(rank, kB);
  }
  ranks->Settle();
  const bool a_first = ranks->log[0].front() == "run a.0";
  for (auto& log : ranks->log) log.clear();
  return a_first ? std::make_pair(kA, kB) : std::make_pair(kB, kA);
}

TEST(AnAbandonedBatchIsNotAwaited) {
  NegotiatorOptions options;
  options.timer = false;
  Ranks ranks(2, options);
  const auto [low, high] = TwoKnownNames(&ranks);
  ranks.Submit(0, low);
  ranks.Send(1, Begin{low});
  ranks.Settle();
  ranks.Submit(0, high);
  ranks.Send(1, Abandon{low->name, "x"});
  ranks.Settle();
  ranks.Submit(1, high);
  ranks.Settle();
  ranks.Expect(
      {"fail " + low->name + ": Abandoned: rank 1 abandoned batch of '" + low->name + "': x",
       "run " + high->name + ".0"});
}

// Rank 1 stays out of rounds, for it lacks the awaited one: what it abandons then has no words on
// their way.
TEST(AnAbandonedGroupIsNotOffered) {
  NegotiatorOptions options;
  options.timer = false;
  Ranks ranks(2, options);
  const auto [low, high] = TwoKnownNames(&ranks);
  ranks.Submit(0, low);
  ranks.Submit(0, high);  // in its next words
  ranks.Submit(1, high);
  ranks.Settle();  // each is in words alone; rank 0 holds the awaited one and waits in the next
                   // round
  ranks.Send(1, Abandon{high->name, "x"});
  ranks.Settle();
  ranks.Submit(1, low);
  ranks.Settle();
  const std::string text =
      "fail " + high->name + ": Abandoned: rank 1 abandoned batch of '" + high->name + "': x";
  ranks.Expect({text, "run " + low->name + ".0"});
}

TEST(ABatchThatAShutdownPreventsIsNotAwaited) {
  NegotiatorOptions options;
  options.timer = false;
  Ranks ranks(3, options);
  const auto [low, high] = TwoKnownNames(&ranks);
  ranks.Submit(0, low);  // on its way with the lower one alone
  ranks.Submit(0, high);
  ranks.Submit(1, low);
  ranks.Submit(2, high);
  ranks.Send(2, Shutdown{"over"});
  ranks.Settle();
  ranks.Submit(1, high);
  ranks.Settle();
  for (const int rank : {0, 1})
    ranks.ExpectOf(rank, {"fail " + low->name + ": Abandoned: rank 2 has shut down: over",
                          "run " + high->name + ".0"});
}

// All of it comes while a round of another name is on its way: the end waits for what was submitted
// whole.
TEST(AShutdownAndANewNameInOneRound) {
  Ranks ranks(2);
  ranks.Submit(0, kA);
  ranks.Submit(1, kA);
  for (const int rank : {0, 1}) {
    ranks.Submit(rank, kB);
    ranks.Send(rank, Shutdown{"over"});
  }
  ranks.Settle();
  for (auto& log : ranks.log) std::sort(log.begin(), log.end());
  ranks.Expect({"all shut down", "run a.0", "run b.0"});
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) { return testing::Main(argc, argv); }
