// The algorithms as pure data: what they send, and that all of them give the same bits.
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "comm/algorithm_communicator.h"
#include "comm/loopback/hub.h"
#include "comm/patterns.h"
#include "conformance_data.h"
#include "testing.h"

using namespace gradred;
using comm::Schedule;
using conformance::Bytes;

namespace {

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 33, 40};

using ReducePattern = Schedule (*)(int rank, int size, int64_t nbytes);
struct NamedPattern {
  const char* name;
  ReducePattern pattern;
};
const NamedPattern kAllReduces[] = {
    {"recursive doubling", comm::RecursiveDoublingAllReduce},
    {"recursive halving", comm::RecursiveHalvingAllReduce},
    {"pairwise", comm::PairwiseAllReduce},
};

std::vector<Schedule> ForAllRanks(int size, const std::function<Schedule(int)>& pattern) {
  std::vector<Schedule> schedules;
  for (int r = 0; r < size; ++r) schedules.push_back(pattern(r));
  return schedules;
}

// All ranks in this thread, polled in turn, which ends since sends finish at once.
void RunAll(const std::vector<Schedule>& schedules,
            const std::function<comm::ScheduleBuffers(int)>& buffers) {
  const int size = static_cast<int>(schedules.size());
  const auto hub = std::make_shared<comm::LoopbackHub>(size);
  std::vector<std::unique_ptr<comm::Transport>> transports;
  std::vector<comm::WorkPtr> works;
  for (int r = 0; r < size; ++r) {
    transports.push_back(hub->MakeTransport(r));
    works.push_back(
        comm::RunSchedule(*transports[r], {{1, 2}, {}, nullptr}, schedules[r], buffers(r)));
  }
  for (int turn = 0; turn < 4 * size + 100; ++turn) {
    for (auto& work : works) work->Poll();
  }
  for (auto& work : works) {
    CHECK(work->Poll());
    CHECK_EQ(work->status().ToString(), Status().ToString());
  }
}

std::vector<Bytes> AllReduce(ReducePattern pattern, std::vector<Bytes> data, int64_t offset,
                             const comm::LayoutPtr& layout) {
  const int size = static_cast<int>(data.size());
  const auto schedules =
      ForAllRanks(size, [&](int r) { return pattern(r, size, layout->nbytes()); });
  RunAll(schedules, [&](int r) {
    return comm::ScheduleBuffers{data[r].data() + offset, nullptr, nullptr, layout};
  });
  return data;
}

// Hops of the tree of one rank a node.
int Hops(int size) { return comm::HopCount(size); }

std::vector<int> EachANode(int size) {
  std::vector<int> nodes(size);
  std::iota(nodes.begin(), nodes.end(), 0);
  return nodes;
}

int64_t SentBytes(const Schedule& schedule) {
  int64_t nbytes = 0;
  for (const auto& stage : schedule.stages) {
    for (const auto& t : stage.sends) nbytes += t.slice.nbytes;
  }
  return nbytes;
}

std::vector<int64_t> SizesOf(const Schedule& schedule, int peer, bool sends) {
  std::vector<int64_t> sizes;
  for (const auto& stage : schedule.stages) {
    for (const auto& t : sends ? stage.sends : stage.receives) {
      if (t.peer == peer) sizes.push_back(t.slice.nbytes);
    }
  }
  return sizes;
}

// What each rank sends to each other one is what that one receives from it, in the same order.
void CheckMatched(const std::vector<Schedule>& schedules) {
  const int size = static_cast<int>(schedules.size());
  for (int a = 0; a < size; ++a) {
    for (int b = 0; b < size; ++b) {
      CHECK(SizesOf(schedules[a], b, true) == SizesOf(schedules[b], a, false));
      if (a == b) CHECK(SizesOf(schedules[a], a, true).empty());
    }
  }
}

}  // namespace

TEST(SendsAndReceivesMatch) {
  for (const int size : kSizes) {
    for (const int64_t nbytes : {0, 64, 640, 64 * 100}) {
      for (const auto& [name, pattern] : kAllReduces) {
        CheckMatched(ForAllRanks(size, [&](int r) { return pattern(r, size, nbytes); }));
      }
      const auto parts = reduce::Split(nbytes, size);
      CheckMatched(
          ForAllRanks(size, [&](int r) { return comm::PairwiseReduceScatter(r, size, parts); }));
      for (const auto gather : {comm::PairwiseAllGather, comm::BruckAllGather}) {
        CheckMatched(ForAllRanks(size, [&](int r) {
          return gather(r, size, parts, {comm::Buffer::kIn, 0, parts[r].nbytes()});
        }));
      }
      for (const int root : {0, size / 2, size - 1}) {
        CheckMatched(ForAllRanks(
            size, [&](int r) { return comm::BinomialBroadcast(r, size, root, nbytes, 1000); }));
      }
    }
    CheckMatched(ForAllRanks(size, [&](int r) { return comm::DisseminationBarrier(r, size); }));
  }
}

// See Note [Order of summation] in reduce/layout.h.
TEST(AllReducesFollowTheTreeBitForBit) {
  const uint64_t seed = 20;
  for (const int size : kSizes) {
    for (const int64_t count : {1, 3, 500}) {
      const auto layout = conformance::FloatingLayout(count, seed, true);
      std::vector<Bytes> inputs;
      for (int r = 0; r < size; ++r) inputs.push_back(conformance::RoundedInputs(*layout, seed, r));
      const Bytes expected =
          conformance::ReduceInOrder(*layout, inputs, EachANode(size), Hops(size));
      for (const auto& [name, pattern] : kAllReduces) {
        for (const Bytes& got : AllReduce(pattern, inputs, 0, layout)) {
          const std::string difference =
              conformance::Difference(*layout, got.data(), expected.data(), {0, layout->nbytes()});
          testing::Check(difference.empty(),
                         std::string(name) + ", " + std::to_string(size) + " ranks: " + difference,
                         __FILE__, __LINE__);
        }
      }
    }
  }
}

// The same element in other sections, at other offsets, among others: the same bits.
TEST(RegroupingKeepsTheBits) {
  constexpr int64_t kCount = 700;
  for (const int size : {3, 5, 6, 7, 8}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      const auto op = IsHalf(dtype) ? reduce::ReduceOp::kAverage : reduce::ReduceOp::kSum;
      const int width = DTypeSize(dtype);
      const auto whole =
          std::make_shared<reduce::Layout>(std::vector<reduce::Section>{{0, kCount, dtype, op}});
      std::vector<Bytes> inputs;
      for (int r = 0; r < size; ++r) inputs.push_back(conformance::RoundedInputs(*whole, 3, r));
      const Bytes expected = AllReduce(comm::RecursiveDoublingAllReduce, inputs, 0, whole)[0];
      std::mt19937_64 random(size);
      for (int trial = 0; trial < 12; ++trial) {
        // Cut into pieces, which go to a layout in another order; piece i holds elements cuts[i]
        // ... cuts[i + 1] - 1.
        std::vector<int64_t> cuts = {0, kCount};
        for (int i = 0; i < 6; ++i) cuts.push_back(static_cast<int64_t>(random() % kCount));
        std::sort(cuts.begin(), cuts.end());
        std::vector<int> order(cuts.size() - 1);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<reduce::Section> sections;
        int64_t at = 64 * static_cast<int64_t>(random() % 3);
        for (const int i : order) {
          sections.push_back({at, cuts[i + 1] - cuts[i], dtype, op});
          at = reduce::AlignUp(at + sections.back().count * width);
        }
        const auto layout = std::make_shared<reduce::Layout>(sections);
        const auto regroup = [&](const Bytes& from) {
          Bytes to(layout->nbytes());
          for (size_t k = 0; k < order.size(); ++k) {
            std::copy_n(from.begin() + cuts[order[k]] * width, sections[k].count * width,
                        to.begin() + sections[k].offset);
          }
          return to;
        };
        std::vector<Bytes> regrouped;
        for (const Bytes& input : inputs) regrouped.push_back(regroup(input));
        const auto& chosen = kAllReduces[trial % 3];
        for (const Bytes& got : AllReduce(chosen.pattern, regrouped, 0, layout)) {
          const Bytes want = regroup(expected);
          const std::string difference =
              conformance::Difference(*layout, got.data(), want.data(), {0, layout->nbytes()});
          testing::Check(difference.empty(), std::string(chosen.name) + ": " + difference, __FILE__,
                         __LINE__);
        }
      }
    }
  }
}

// Equal bits on all ranks even where addition and minimum are not commutative in their bits.
TEST(NansAndSignedZerosAreTheSameOnAllRanks) {
  const auto layout = std::make_shared<reduce::Layout>(
      std::vector<reduce::Section>{{0, 32, DType::kFloat32, reduce::ReduceOp::kSum},
                                   {128, 32, DType::kFloat32, reduce::ReduceOp::kMin},
                                   {256, 32, DType::kFloat32, reduce::ReduceOp::kMax}});
  for (const int size : {2, 3, 6, 8}) {
    std::vector<Bytes> inputs(size, Bytes(layout->nbytes()));
    for (int r = 0; r < size; ++r) {
      for (int64_t i = 0; i < layout->nbytes() / 4; ++i) {
        const uint64_t h = conformance::Hash(5, r, i);
        const uint32_t specials[] = {0x7fc00000u + r, 0xffc00000u + r, 0u, 0x80000000u,
                                     0x3f800000u};
        std::memcpy(inputs[r].data() + 4 * i, &specials[h % 5], 4);
      }
    }
    const Bytes expected = AllReduce(comm::RecursiveDoublingAllReduce, inputs, 0, layout)[0];
    for (const auto& [name, pattern] : kAllReduces) {
      const std::vector<Bytes> got = AllReduce(pattern, inputs, 0, layout);
      for (const Bytes& of_rank : got) CHECK(of_rank == got[0]);
      // Which NaN it is may depend on the algorithm: see kernels.h.
      for (int64_t i = 0; i < layout->nbytes(); i += 4) {
        float a = 0, b = 0;
        std::memcpy(&a, got[0].data() + i, 4);
        std::memcpy(&b, expected.data() + i, 4);
        CHECK(std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, 4) == 0);
      }
    }
  }
}

// See Note [Averages of halves] in reduce/layout.h.
TEST(AveragesOfHalvesNeitherOverflowNorVanish) {
  const auto layout = std::make_shared<reduce::Layout>(
      std::vector<reduce::Section>{{0, 2, DType::kFloat16, reduce::ReduceOp::kAverage}});
  for (int size = 2; size <= 8; ++size) {
    const double residual = std::ldexp(1.0, Hops(size)) / size;
    const Float16 large = ToFloat16(40000.0f), small = ToFloat16(1e-7f);
    Bytes input(layout->nbytes());
    std::memcpy(input.data(), &large, 2);
    std::memcpy(input.data() + 2, &small, 2);
    for (const auto& [name, pattern] : kAllReduces) {
      const Bytes got = AllReduce(pattern, std::vector<Bytes>(size, input), 0, layout)[size - 1];
      const double mean = conformance::LoadNumber(got.data(), DType::kFloat16, 0) * residual;
      CHECK_EQ(ToFloat(ToFloat16(static_cast<float>(mean))), 40000.0f);
      // One ulp of the smallest float16 is 2^-24: half of it for the result, half times the
      // residual (less than 2) for the last hop.
      const double tiny = conformance::LoadNumber(got.data(), DType::kFloat16, 1) * residual;
      CHECK(tiny > 0);
      CHECK(std::abs(tiny - ToFloat(small)) <= 1.5 * 0x1p-24);
    }
  }
}

TEST(BytesSentAreThoseOfTheLiterature) {
  const int64_t n = 64 * 9 * 16;
  for (int r = 0; r < 16; ++r) {
    CHECK_EQ(SentBytes(comm::RecursiveDoublingAllReduce(r, 16, n)), 4 * n);
    CHECK_EQ(comm::RecursiveDoublingAllReduce(r, 16, n).stages.size(), 4u);
    CHECK_EQ(SentBytes(comm::RecursiveHalvingAllReduce(r, 16, n)), 2 * n * 15 / 16);
    CHECK_EQ(comm::RecursiveHalvingAllReduce(r, 16, n).stages.size(), 8u);
    CHECK_EQ(SentBytes(comm::PairwiseAllReduce(r, 16, n)), 2 * n * 15 / 16);
    CHECK_EQ(comm::PairwiseAllReduce(r, 16, n).stages.size(), 2u);
  }
  for (int r = 0; r < 9; ++r) CHECK_EQ(SentBytes(comm::PairwiseAllReduce(r, 9, n)), 2 * n * 8 / 9);
  // The recursive algorithms keep log2(size) + 2 exchanges when the size is no power of two.
  CHECK_EQ(comm::RecursiveDoublingAllReduce(0, 9, n).stages.size(), 5u);
  // Scratch memory is the data once for halving, twice where a fold comes first.
  CHECK(comm::RecursiveHalvingAllReduce(0, 16, n).scratch_nbytes <= n);
  CHECK(comm::RecursiveHalvingAllReduce(0, 17, n).scratch_nbytes <= 2 * n);
}

TEST(ManyPeersAreServedInWindows) {
  const int size = 5 * comm::kWindow;
  const auto parts = reduce::Split(64 * size, size);
  const Schedule s =
      comm::PairwiseAllGather(3, size, parts, {comm::Buffer::kIn, 0, parts[3].nbytes()});
  for (const auto& stage : s.stages) CHECK(stage.sends.size() <= comm::kWindow);
  CHECK_EQ(SentBytes(s), 64 * (size - 1));
}

TEST(GathersPutEveryBlockInItsPlace) {
  for (const int size : kSizes) {
    comm::Ranges blocks(size);  // in descending order, with gaps and empty ones
    int64_t at = 0;
    for (int r = size; r-- > 0;) {
      blocks[r] = {at, at + r % 4 * 5};
      at = blocks[r].end + 3;
    }
    const auto byte = [](int r, int64_t i) { return static_cast<char>(31 * r + i + 1); };
    for (const auto gather : {comm::PairwiseAllGather, comm::BruckAllGather}) {
      std::vector<Bytes> in(size), out(size, Bytes(at));
      for (int r = 0; r < size; ++r) {
        for (int64_t i = 0; i < blocks[r].nbytes(); ++i) in[r].push_back(byte(r, i));
      }
      const auto schedules = ForAllRanks(size, [&](int r) {
        return gather(r, size, blocks, {comm::Buffer::kIn, 0, blocks[r].nbytes()});
      });
      RunAll(schedules, [&](int r) {
        return comm::ScheduleBuffers{nullptr, in[r].data(), out[r].data(), nullptr};
      });
      Bytes expected(at);
      for (int r = 0; r < size; ++r) {
        for (int64_t i = 0; i < blocks[r].nbytes(); ++i) expected[blocks[r].begin + i] = byte(r, i);
      }
      for (const Bytes& got : out) CHECK(got == expected);
    }
  }
}

TEST(BroadcastReachesEverybodyOnce) {
  for (const int size : kSizes) {
    for (int root = 0; root < size; ++root) {
      const auto schedules = ForAllRanks(
          size, [&](int r) { return comm::BinomialBroadcast(r, size, root, 2500, 1000); });
      for (int r = 0; r < size; ++r) {
        int64_t received = 0;
        for (int peer = 0; peer < size; ++peer) {
          const auto sizes = SizesOf(schedules[r], peer, false);
          received += std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
        }
        CHECK_EQ(received, r == root ? 0 : 2500);
      }
      std::vector<Bytes> data(size, Bytes(2500));
      data[root].assign(2500, 'b');
      RunAll(schedules, [&](int r) {
        return comm::ScheduleBuffers{nullptr, nullptr, data[r].data(), nullptr};
      });
      for (const Bytes& got : data) CHECK(got == Bytes(2500, 'b'));
    }
  }
}

TEST(UnionTakesLogarithmicallyManyExchanges) {
  for (const int size : kSizes) {
    const int p = comm::LargestPowerOfTwo(size);
    for (int r = 0; r < size; ++r) {
      const int steps = static_cast<int>(comm::RecursiveDoublingUnion(r, size).size());
      CHECK(steps <= comm::HopCount(size) + 1);
      if (r >= p) CHECK_EQ(steps, 2);
    }
  }
}

// Two times (size - 1) / size of the data, to one peer.
TEST(RingSendsTwiceTheDataToItsNeighbour) {
  for (const int size : kSizes) {
    const int64_t nbytes = 64 * 16 * size;
    const auto schedules =
        ForAllRanks(size, [&](int r) { return comm::RingAllReduce(r, size, nbytes); });
    CheckMatched(schedules);
    for (const Schedule& schedule : schedules)
      CHECK_EQ(SentBytes(schedule), 2 * nbytes * (size - 1) / size);
  }
}

TEST(TableOfAlgorithmsIsRead) {
  using comm::Algorithm;
  const auto rows = comm::ParseAlgorithms(
      "allreduce:0=recursive_doubling,32768=ring;allgather:0=pairwise", false);
  CHECK_EQ(rows.size(), size_t{3});
  const auto merged = comm::MergeAlgorithms(4, rows);
  CHECK_EQ(merged.size(), size_t{3});
  CHECK(comm::Choose(merged, "allreduce", 32767) == Algorithm::kRecursiveDoubling);
  CHECK(comm::Choose(merged, "allreduce", 32768) == Algorithm::kRing);
  CHECK(comm::Choose(merged, "allgather", 1) == Algorithm::kPairwise);
  CHECK(comm::ParseAlgorithms("", true).empty());
  const auto merged_gather =
      comm::MergeAlgorithms(4, comm::ParseAlgorithms("allgather:0=bruck", true));
  CHECK(comm::Choose(merged_gather, "allreduce", 1 << 20) == Algorithm::kRecursiveHalving);
  CHECK(comm::Choose(merged_gather, "allgather", 1 << 20) == Algorithm::kBruck);
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"ring", "expected allreduce: or allgather:"},
           {"allreduce:", "expected BYTES=ALGORITHM"},
           {"allreduce:0=pairwise;", "expected allreduce: or allgather:"},
           {"allreduce:0=pairwise;allreduce:0=pairwise", "allreduce comes twice"},
           {"allreduce:1=pairwise", "begin at 0"},
           {"allreduce:0=pairwise,0=pairwise", "ascend"},
           {"allreduce:x=pairwise", "'x': expected a number of bytes"},
           {"allreduce:-1=pairwise", "'-1': expected a number of bytes"},
           {"allreduce:0=bruck", "recursive_halving, pairwise, ring, native,"},
           {"allgather:0=ring", "for allgather, one of pairwise, bruck"},
           {"allreduce:0=native", "GRADRED_REPRODUCIBLE=0"},
           {"allreduce:0=ring", "GRADRED_REPRODUCIBLE=0"}}) {
    CHECK_ERROR(comm::ParseAlgorithms(text, true), Kind::kInvalidArgument, says);
  }
}

TEST(TableOfAlgorithmsIsComplete) {
  for (const int size : {1, 2, 6, 8, 48, 64}) {
    bool reduces = false, gathers = false;
    for (const comm::AlgorithmRow& row : comm::DefaultAlgorithms(size)) {
      CHECK(std::string(row.why) != "");
      CHECK(comm::IsReproducible(row.algorithm));
      reduces |= std::string(row.collective) == "allreduce" && row.from_nbytes == 0;
      gathers |= std::string(row.collective) == "allgather" && row.from_nbytes == 0;
      if (row.algorithm == comm::Algorithm::kPairwise && row.collective == std::string("allreduce"))
        CHECK_EQ(size, 6);
    }
    CHECK(reduces);
    CHECK(gathers);
  }
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
