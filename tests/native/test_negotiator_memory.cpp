// Names that come and go: ids are given back, memory stays flat over a million calls and a hundred
// thousand names.
#include <cstdlib>
#include <new>

#include "protocol_ranks.h"

namespace {
int64_t g_live_bytes = 0;
constexpr size_t kHeader = 16;  // keeps the alignment of malloc
}  // namespace

void* operator new(size_t size) {
  auto* block = static_cast<char*>(std::malloc(size + kHeader));
  if (!block) throw std::bad_alloc();
  *reinterpret_cast<size_t*>(block) = size;
  g_live_bytes += static_cast<int64_t>(size);
  return block + kHeader;
}
void operator delete(void* pointer) noexcept {
  if (!pointer) return;
  char* block = static_cast<char*>(pointer) - kHeader;
  g_live_bytes -= static_cast<int64_t>(*reinterpret_cast<size_t*>(block));
  std::free(block);
}
void operator delete(void* pointer, size_t) noexcept { operator delete(pointer); }

namespace protocol {
namespace {

NegotiatorOptions RetireAfter(int64_t rounds) {
  NegotiatorOptions options;
  options.retire_after = rounds;
  return options;
}

void Call(Ranks* ranks, const DeclarationPtr& declaration) {
  for (int rank = 0; rank < ranks->set.size(); ++rank) ranks->Submit(rank, declaration);
  ranks->Settle();
  for (auto& log : ranks->log) log.clear();
}

TEST(AnUnusedNameGivesItsIdsBack) {
  Ranks ranks(3, RetireAfter(5));
  const auto a = Domain("a", {"s", "s"}, {1, 2}), b = Domain("b", {"s"});
  Call(&ranks, a);
  CHECK_EQ(ranks.counters().ids, 2);
  for (int i = 0; i < 10; ++i) Call(&ranks, b);
  CHECK_EQ(ranks.counters().domains, 1);
  CHECK_EQ(ranks.counters().ids, 1);
  Call(&ranks, a);  // as a new one
  CHECK_EQ(ranks.counters().ids, 3);
}

TEST(AHeldNameStays) {
  Ranks ranks(2, RetireAfter(5));
  const auto a = Domain("a", {"s"}), b = Domain("b", {"s"});
  Call(&ranks, a);
  ranks.Submit(0, a);
  for (int i = 0; i < 20; ++i) {
    for (int rank = 0; rank < 2; ++rank) ranks.Submit(rank, b);
    ranks.clock.RunFor(100 * kMillisecond);
  }
  CHECK_EQ(ranks.counters().domains, 2);
  for (auto& log : ranks.log) log.clear();
  ranks.Submit(1, a);
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

TEST(AHalfRunBatchStays) {
  Ranks ranks(2, RetireAfter(5));
  const auto a = Domain("a", {"s", "s"}, {1, 2}), b = Domain("b", {"s"});
  for (int rank = 0; rank < 2; ++rank) {
    ranks.Send(rank, Begin{a});
    ranks.Send(rank, Ready{"a", 1});
  }
  for (int i = 0; i < 20; ++i) Call(&ranks, b);
  CHECK_EQ(ranks.counters().domains, 2);
  for (int rank = 0; rank < 2; ++rank) ranks.Send(rank, Ready{"a", 0});
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

// Rank 0 has begun, with nothing complete that the others could see: the name retires, and rank 0
// declares it again.
TEST(ABegunNameIsDeclaredAgain) {
  Ranks ranks(2, RetireAfter(5));
  const auto a = Domain("a", {"s", "s"}, {1, 2}), b = Domain("b", {"s"});
  ranks.Send(0, Begin{a});
  for (int i = 0; i < 20; ++i) Call(&ranks, b);
  ranks.Send(0, Ready{"a", 0});
  ranks.Send(0, Ready{"a", 1});
  ranks.Submit(1, a);
  ranks.Settle();
  ranks.Expect({"run a.0", "run a.1"});
}

TEST(AnOwedFailureOutlivesTheName) {
  Ranks ranks(2, RetireAfter(5));
  const auto a = Domain("a", {"s"}), b = Domain("b", {"s"});
  ranks.Send(0, Begin{a});
  ranks.Send(0, Abandon{"a", "x"});
  for (int i = 0; i < 20; ++i) Call(&ranks, b);
  CHECK_EQ(ranks.counters().domains, 1);
  ranks.Submit(0, a);  // the batch after the one that failed
  ranks.Send(1, Begin{a});
  ranks.ExpectOf(1, {"fail a: Abandoned: rank 0 abandoned batch of 'a': x"});
  ranks.Submit(1, a);
  ranks.Settle();
  ranks.Expect({"run a.0"});
}

// Bytes that the second half of the calls left behind.
template <class Fn>
int64_t Growth(int64_t calls, Fn call) {
  int64_t middle = 0;
  for (int64_t i = 0; i < calls; ++i) {
    if (i == calls / 2) middle = g_live_bytes;
    call(i);
  }
  return g_live_bytes - middle;
}

TEST(AMillionCallsOfFewNames) {
  Ranks ranks(2);
  std::vector<DeclarationPtr> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(Domain("call/" + std::to_string(i), {"s"}));
  const int64_t grown =
      Growth(1'000'000, [&](int64_t i) { Call(&ranks, calls[static_cast<size_t>(i % 8)]); });
  CHECK_EQ(ranks.counters().ids, 8);
  CHECK_EQ(ranks.counters().unions, 0);
  CHECK(grown < 64 * 1024);
}

TEST(AHundredThousandNames) {
  Ranks ranks(2, RetireAfter(500));
  const int64_t grown = Growth(100'000, [&](int64_t i) {
    Call(&ranks, Domain("name " + std::to_string(i), {"allreduce sum float32 [3]"}));
  });
  CHECK(ranks.counters().ids <= 500);
  CHECK(grown < 64 * 1024);
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) { return testing::Main(argc, argv); }
