// The parts of the negotiator: ranges of ranks, records and their merge, round words, the id table.
#include <algorithm>
#include <random>

#include "core/id_table.h"
#include "core/negotiator.h"
#include "core/records.h"
#include "core/round_words.h"
#include "testing.h"

namespace gradred::core {
namespace {

Declaration Text(const std::string& name, const std::string& signature, const std::string& label) {
  return {name, {{signature, label}}, {1}, "payload"};
}

// --- Ranks
// ------------------------------------------------------------------------------------------------------------------

TEST(RangesOfRanks) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<bool> member(40);
    RankSet set, other;
    for (int i = 0; i < 30; ++i) {
      const int rank = static_cast<int>(random() % 40);
      member[rank] = true;
      (i % 2 ? set : other).Add(RankSet(rank));
    }
    set.Add(other);
    std::vector<bool> seen(40);
    int before = -2;
    for (const auto& [first, last] : set.ranges()) {
      CHECK(first > before + 1 && last >= first);
      for (int rank = first; rank <= last; ++rank) seen[rank] = true;
      before = last;
    }
    CHECK(seen == member);
  }
}

TEST(RanksInWords) {
  RankSet set(0);
  for (const int rank : {3, 2, 7}) set.Add(RankSet(rank));
  CHECK_EQ(set.Describe({}), "rank 0, 2-3, 7");
  CHECK_EQ(set.Describe({1, 9, 3, 2, 4, 5, 6, 8}), "rank 1-3, 8");
  RankSet scattered;
  for (int rank = 0; rank < 100; rank += 2) scattered.Add(RankSet(rank));
  CHECK_EQ(scattered.Describe({}), "rank 0, 2, 4, 6, 8, 10, 12, 14, ... (50 ranks)");
}

// --- Records
// ----------------------------------------------------------------------------------------------------------------

Records RandomRecords(std::mt19937_64* random) {
  const auto below = [random](uint64_t n) { return static_cast<int>((*random)() % n); };
  Records records;
  for (int i = below(4); i > 0; --i) {
    const std::string name = "n" + std::to_string(below(3)), signature = std::to_string(below(2));
    records.AddNew(DigestOf(name, 1), DigestOf(signature, 1), below(5),
                   Text(name, signature, std::to_string(below(3))));
  }
  for (int i = below(3); i > 0; --i)
    records.abandoned[{"n" + std::to_string(below(3)), below(4)}] = {below(2),
                                                                     std::to_string(below(3))};
  if (below(2)) records.joins[below(4)] = below(3);
  if (below(2)) records.shutdowns[below(4)] = {std::to_string(below(2)), std::to_string(below(2))};
  return records;
}

TEST(MergeIsCommutativeAssociativeAndIdempotent) {
  std::mt19937_64 random(11);
  const auto merge = &Negotiator::Merge;
  const std::string nothing = Records().Encode();
  for (int trial = 0; trial < 3000; ++trial) {
    const std::string a = RandomRecords(&random).Encode(), b = RandomRecords(&random).Encode(),
                      c = RandomRecords(&random).Encode();
    CHECK(merge(a, b) == merge(b, a));
    CHECK(merge(a, merge(b, c)) == merge(merge(a, b), c));
    CHECK(merge(a, a) == a);
    CHECK(merge(a, nothing) == a);
    CHECK(merge(merge(a, b), b) == merge(a, b));
    CHECK(Records::Decode(a).Encode() == a);
  }
}

TEST(TheLowestHoldersTextStays) {
  Records low, high;
  low.AddNew({1, 2}, {3, 4}, 2, Text("n", "s", "of rank 2"));
  high.AddNew({1, 2}, {3, 4}, 5, Text("n", "s", "a label that compares lower"));
  high.MergeFrom(low);
  CHECK_EQ(high.news.size(), size_t{1});
  const auto& record = high.news.begin()->second;
  CHECK_EQ(record.holders.Describe({}), "rank 2, 5");
  Reader in(record.text);
  CHECK_EQ(GetDeclaration(&in).entries[0].label, "of rank 2");
}

TEST(BrokenBlobsAreRefused) {
  std::mt19937_64 random(13);
  int refused = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::string blob = RandomRecords(&random).Encode();
    CHECK_ERROR(Records::Decode(blob + "x"), Kind::kTransportError, "too long");
    CHECK_ERROR(Records::Decode(blob.substr(0, random() % blob.size())), Kind::kTransportError, "");
    blob[random() % blob.size()] ^= static_cast<char>(1 << random() % 8);
    try {  // any bytes: an error or records, never anything else
      (void)Records::Decode(blob);
    } catch (const Error& e) {
      CHECK(e.kind() == Kind::kTransportError);
      ++refused;
    }
  }
  CHECK(refused > 100);
}

// --- Words
// ------------------------------------------------------------------------------------------------------------------

std::vector<uint64_t> And(std::vector<uint64_t> a, const std::vector<uint64_t>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] &= b[i];
  return a;
}

std::vector<int> Bits(const Bitvector& bits) {
  std::vector<int> result;
  bits.ForEach([&](int bit) { result.push_back(bit); });
  return result;
}

TEST(OneAndGivesBothHalves) {
  std::mt19937_64 random(17);
  for (const int ids : {0, 1, 63, 64, 65, 200}) {
    for (int trial = 0; trial < 200; ++trial) {
      const int ranks = 1 + static_cast<int>(random() % 4);
      std::vector<std::vector<bool>> holds(ranks, std::vector<bool>(ids));
      std::vector<bool> joined(ranks);
      std::vector<uint64_t> all;
      for (int rank = 0; rank < ranks; ++rank) {
        Bitvector held;
        RoundStatus status;
        status.joined = joined[rank] = random() % 4 == 0;
        status.check = 99;
        for (int id = 0; id < ids; ++id) {
          holds[rank][id] = random() % 3 > 0;
          if (holds[rank][id]) held.Set(id);
        }
        const auto words = EncodeRound(status, joined[rank], Bitvector(), held, ids);
        all = rank == 0 ? words : And(all, words);
      }
      std::vector<int> agreed, pending;
      for (int id = 0; id < ids; ++id) {
        bool everywhere = true, somewhere = false;
        for (int rank = 0; rank < ranks; ++rank) {
          everywhere = everywhere && (holds[rank][id] || joined[rank]);
          somewhere = somewhere || holds[rank][id];
        }
        if (somewhere) (everywhere ? agreed : pending).push_back(id);
      }
      const RoundResult result = DecodeRound(all, ids, 99);
      CHECK(Bits(result.agreed) == agreed);
      CHECK(Bits(result.pending) == pending);
      CHECK_EQ(result.anybody_joined, std::count(joined.begin(), joined.end(), true) > 0);
    }
  }
}

TEST(StatusBitsSayNobodyOrEverybody) {
  RoundStatus plain, raised;
  raised.has_records = raised.join_idle = raised.shut_down_idle = true;
  const auto words = [](const RoundStatus& status) {
    return EncodeRound(status, false, Bitvector(), Bitvector(), 0);
  };
  RoundResult result = DecodeRound(And(words(plain), words(raised)), 0, 0);
  CHECK(result.anybody_has_records && !result.anybody_joined && !result.anybody_declares);
  CHECK(!result.everybody_join_idle && !result.everybody_shut_down_idle);
  result = DecodeRound(And(words(raised), words(raised)), 0, 0);
  CHECK(result.everybody_join_idle && result.everybody_shut_down_idle);
  raised.check = 5;
  CHECK_ERROR(DecodeRound(And(words(plain), words(raised)), 0, 0), Kind::kInternal, "differ");
  CHECK_ERROR(DecodeRound(And(words(plain), words(raised)), 0, 5), Kind::kInternal, "differ");
}

TEST(DigestsCompareByTwoAnds) {
  std::mt19937_64 random(19);
  const auto words = [](const Digest& digest) {
    RoundStatus status;
    status.declares = digest != Digest();
    status.declared = digest;
    return EncodeRound(status, false, Bitvector(), Bitvector(), 3);
  };
  for (int trial = 0; trial < 1000; ++trial) {
    const Digest a{random(), random()};
    const Digest b = trial % 2 ? Digest{a.hi, a.lo ^ uint64_t{1} << trial % 64} : Digest();
    CHECK(DecodeRound(And(words(a), words(a)), 3, 0).declared_alike);
    const RoundResult differ = DecodeRound(And(words(a), words(b)), 3, 0);
    CHECK(!differ.declared_alike && differ.anybody_declares);
  }
  CHECK(!DecodeRound(words({}), 3, 0).declared_alike);
}

// --- Ids
// --------------------------------------------------------------------------------------------------------------------

DeclarationPtr Groups(const std::string& name, int groups) {
  auto declaration = std::make_shared<Declaration>();
  declaration->name = name;
  for (int i = 1; i <= groups; ++i) {
    declaration->entries.push_back({"s", "x"});
    declaration->group_ends.push_back(i);
  }
  return declaration;
}

TEST(TheLowestFreeIdsAreGiven) {
  IdTable table;
  Domain* a = table.Add(Groups("a", 2), {1, 0}, {1, 0}, 1);
  Domain* b = table.Add(Groups("b", 3), {2, 0}, {1, 0}, 1);
  Domain* c = table.Add(Groups("c", 1), {3, 0}, {1, 0}, 1);
  CHECK(c->ids == std::vector<int>{5});
  table.Remove(b);
  CHECK_EQ(table.limit(), 6);
  CHECK_EQ(table.ids(), 3);
  CHECK(table.At(3).domain == nullptr && table.At(99).domain == nullptr);
  const Domain* d = table.Add(Groups("d", 4), {4, 0}, {1, 0}, 2);
  CHECK((d->ids == std::vector<int>{2, 3, 4, 6}));
  CHECK(table.At(6).domain == d && table.At(6).group == 3);
  table.Resign(a, Groups("a", 2), {2, 0}, 3);
  CHECK((a->ids == std::vector<int>{0, 1}));
  table.Resign(a, Groups("a", 1), {3, 0}, 3);
  CHECK((a->ids == std::vector<int>{0}));
  table.Remove(table.Find("d"));
  CHECK_EQ(table.limit(), 6);
  table.Remove(c);
  CHECK_EQ(table.limit(), 1);
  CHECK(table.LeastRecentlyUsed() == a && table.Find("d") == nullptr);
}

}  // namespace
}  // namespace gradred::core

int main(int argc, char** argv) { return testing::Main(argc, argv); }
