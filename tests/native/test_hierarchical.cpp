// hierarchical over loopback, with works that complete in random order and ranks that poll in
// random order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "checked_cargo.h"
#include "comm/algorithm_communicator.h"
#include "comm/hierarchical.h"
#include "comm/loopback/hub.h"
#include "conformance.h"
#include "faulty_transport.h"
#include "ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::comm;
using reduce::Layout;
using reduce::ReduceOp;

namespace {

constexpr uint32_t kSeed = 4711;
constexpr Nanos kLimit = 60 * kSecond;

std::vector<int> NodeOf(const std::vector<int>& node_sizes) {
  std::vector<int> node_of;
  for (size_t node = 0; node < node_sizes.size(); ++node)
    node_of.insert(node_of.end(), static_cast<size_t>(node_sizes[node]), static_cast<int>(node));
  return node_of;
}

// One rank: its transport, whose transfers are reported late and so in any order, and the composed
// communicator.
struct Rank {
  std::unique_ptr<Transport> inner, transport;
  std::unique_ptr<Communicator> communicator;
  int rank = 0, size = 0;
};

Rank MakeRank(LoopbackHub& hub, int rank, const std::vector<int>& node_of,
              const HierarchicalOptions& options, uint32_t seed) {
  Rank r;
  r.rank = rank;
  r.size = static_cast<int>(node_of.size());
  r.inner = hub.MakeTransport(rank);
  r.transport =
      std::make_unique<testing::FaultyTransport>(*r.inner, testing::Faults{seed, 5, -1, -1});
  const Topology t = Topology::Make(rank, node_of);
  std::vector<int> all(node_of.size()), node = t.RanksOfNode(node_of[static_cast<size_t>(rank)]),
                                        across;
  std::iota(all.begin(), all.end(), 0);
  bool owner = true;
  for (int n = 0; n < t.nodes(); ++n) {
    const std::vector<int> ranks = t.RanksOfNode(n);
    owner = owner && t.local_rank < static_cast<int>(ranks.size());
    if (owner) across.push_back(ranks[static_cast<size_t>(t.local_rank)]);
  }
  auto inter = owner ? MakeAlgorithmCommunicator(*r.transport, across, 3) : nullptr;
  r.communicator =
      MakeHierarchical(t, MakeAlgorithmCommunicator(*r.transport, node, 2), std::move(inter),
                       MakeAlgorithmCommunicator(*r.transport, all, 1), options);
  return r;
}

// body(rank) on a thread each.
template <class Body>
void WithRanks(const std::vector<int>& node_sizes, const HierarchicalOptions& options,
               uint32_t seed, Body body) {
  const std::vector<int> node_of = NodeOf(node_sizes);
  const auto hub = std::make_shared<LoopbackHub>(static_cast<int>(node_of.size()));
  try {
    testing::RunRanks(hub->size(), [&](int r) {
      Rank rank = MakeRank(*hub, r, node_of, options, seed);
      body(rank);
    });
  } catch (const testing::Failure& failure) {
    throw testing::Failure("seed " + std::to_string(seed) + ": " + failure.what());
  }
}

void WaitFor(Work& work, Rank& r, const std::string& what) {
  ThrowIfError(Wait(work, *r.transport, kLimit, what));
}

LayoutPtr MixedLayout(int64_t scale) {
  std::vector<reduce::Section> sections;
  int64_t at = 64;  // a gap in front
  const auto add = [&](int64_t count, DType dtype, ReduceOp op) {
    sections.push_back({at, count, dtype, op});
    at = reduce::AlignUp(at + count * DTypeSize(dtype)) + 128;
  };
  add(37 * scale, DType::kFloat32, ReduceOp::kSum);
  add(1, DType::kInt64, ReduceOp::kMax);
  add(101 * scale, DType::kFloat16, ReduceOp::kAverage);
  add(5, DType::kBool, ReduceOp::kSum);
  add(29 * scale, DType::kFloat64, ReduceOp::kProduct);
  add(63 * scale, DType::kBfloat16, ReduceOp::kSum);
  return std::make_shared<const Layout>(std::move(sections));
}

// The same bytes for (rank, call) in every run: finite values whose sums round.
void Fill(uint8_t* data, const Layout& layout, int rank, int call) {
  std::mt19937 random(static_cast<uint32_t>(1000 * call + rank));
  std::uniform_real_distribution<float> real(0.5f, 1.5f);
  for (const reduce::Section& s : layout.sections())
    for (int64_t i = 0; i < s.count; ++i) {
      uint8_t* p = data + s.offset + i * DTypeSize(s.dtype);
      const float f = real(random);
      const double d = f;
      const int64_t n = static_cast<int64_t>(random());
      const uint16_t half = ToFloat16(f).bits, bfloat = ToBfloat16(f).bits;
      switch (s.dtype) {
        case DType::kFloat32:
          std::memcpy(p, &f, 4);
          break;
        case DType::kFloat64:
          std::memcpy(p, &d, 8);
          break;
        case DType::kInt64:
          std::memcpy(p, &n, 8);
          break;
        case DType::kFloat16:
          std::memcpy(p, &half, 2);
          break;
        case DType::kBfloat16:
          std::memcpy(p, &bfloat, 2);
          break;
        default:
          *p = n % 8 == 0;
      }
    }
}

// Results of `calls` overlapping allreduces, whose works each rank polls in an order of its own.
std::vector<std::vector<uint8_t>> ReduceAll(const std::vector<int>& node_sizes,
                                            const HierarchicalOptions& options, uint32_t seed,
                                            int calls, int64_t scale) {
  const LayoutPtr layout = MixedLayout(scale);
  const size_t nbytes = static_cast<size_t>(layout->nbytes());
  const size_t size = NodeOf(node_sizes).size();
  std::vector<std::vector<std::vector<uint8_t>>> results(size);
  WithRanks(node_sizes, options, seed, [&](Rank& r) {
    std::mt19937 random(seed * 31 + static_cast<uint32_t>(r.rank));
    std::vector<SegmentPtr> segments;
    std::vector<WorkPtr> works;
    constexpr int64_t kOffset = 192;
    for (int call = 0; call < calls; ++call) {
      segments.push_back(r.communicator->Alloc(kOffset + layout->nbytes()));
      uint8_t* data = static_cast<uint8_t*>(segments.back()->data()) + kOffset;
      std::memset(data, 0, nbytes);
      Fill(data, *layout, r.rank, call);
      works.push_back(r.communicator->AllReduce(*segments.back(), kOffset, layout));
      if (random() % 2) works[random() % works.size()]->Poll();
    }
    const Nanos start = Now();
    for (size_t left = works.size(); left > 0;) {
      testing::Check(Now() - start < kLimit, "all works finish in time", __FILE__, __LINE__);
      const size_t i = random() % works.size();
      if (!works[i]) continue;
      if (!works[i]->Poll()) {
        std::this_thread::yield();
        continue;
      }
      ThrowIfError(works[i]->status());
      works[i].reset();
      --left;
    }
    for (const SegmentPtr& segment : segments) {
      const uint8_t* data = static_cast<const uint8_t*>(segment->data()) + kOffset;
      results[static_cast<size_t>(r.rank)].emplace_back(data, data + nbytes);
    }
    WorkPtr barrier = r.communicator->Barrier();
    WaitFor(*barrier, r, "barrier");
  });
  for (const auto& result : results) CHECK(result == results[0]);  // bits alike on all ranks
  return results[0];
}

// The tree of Note [Order of summation], done by hand: pairs of ranks within a node
// (AlgorithmCommunicator), then of nodes.
std::vector<uint8_t> Serial(const std::vector<int>& node_sizes, int call, int64_t scale) {
  const LayoutPtr layout = MixedLayout(scale);
  const reduce::Range all{0, layout->nbytes()};
  const auto tree = [&](std::vector<std::vector<uint8_t>> values) {
    size_t p = 1;
    while (p * 2 <= values.size()) p *= 2;
    if (p < values.size())
      for (size_t i = 0; i < p; ++i) {
        if (i + p < values.size())
          layout->ReduceHop(values[i].data(), values[i].data(), values[i + p].data(), all);
        else
          layout->HopAlone(values[i].data(), all);
      }
    for (size_t d = p / 2; d >= 1; d /= 2)
      for (size_t i = 0; i < d; ++i)
        layout->ReduceHop(values[i].data(), values[i].data(), values[i + d].data(), all);
    return values[0];
  };
  const auto log2 = [](int n) {
    int k = 0;
    while (1 << k < n) ++k;
    return k;
  };
  const int largest = *std::max_element(node_sizes.begin(), node_sizes.end());
  std::vector<std::vector<uint8_t>> nodes;
  int rank = 0;
  for (int local_size : node_sizes) {
    std::vector<std::vector<uint8_t>> values;
    for (int i = 0; i < local_size; ++i) {
      values.emplace_back(static_cast<size_t>(layout->nbytes()), uint8_t{0});
      Fill(values.back().data(), *layout, rank++, call);
    }
    nodes.push_back(tree(std::move(values)));
    for (int i = log2(local_size); i < log2(largest); ++i)
      layout->HopAlone(nodes.back().data(), all);
  }
  return tree(std::move(nodes));
}

const std::vector<std::vector<int>> kShapes = {{1},    {3},    {1, 1, 1}, {2, 2}, {2, 2, 2, 2},
                                               {4, 4}, {2, 1}, {3, 2, 2}, {1, 4}};

}  // namespace

TEST(ConformsWithTransfersThatFinishInAnyOrder) {
  uint32_t seed = kSeed;
  for (const std::vector<int>& shape : {std::vector<int>{2, 2}, {2, 2, 2, 2}, {2, 1}, {3, 2, 2}})
    for (int64_t chunk : {1024, 4096})
      WithRanks(shape, {chunk, 2}, ++seed, [&](Rank& r) {
        conformance::ConformanceOptions options;
        options.name =
            "hierarchical(late loopback, late loopback), chunks of " + std::to_string(chunk);
        options.seed = seed;
        options.timeout = kLimit;
        options.ordered =
            false;  // a node of messages sums in a tree of hops: compared with Serial() below
        conformance::CheckCommunicator(*r.communicator, options);
      });
}

TEST(OverlappingCallsInAnyOrderAndAnyChunksGiveTheSameBits) {
  uint32_t seed = kSeed;
  for (const std::vector<int>& shape : kShapes)
    for (int64_t chunk : {64, 320, 1024, 1 << 20})
      for (int in_flight : {1, 3}) {
        const int64_t scale = 3;
        const auto results = ReduceAll(shape, {chunk, in_flight}, ++seed, 3, scale);
        for (int call = 0; call < 3; ++call)
          testing::Check(results[static_cast<size_t>(call)] == Serial(shape, call, scale),
                         "call " + std::to_string(call) + " with chunks of " +
                             std::to_string(chunk) + ", seed " + std::to_string(seed) + ", nodes " +
                             std::to_string(shape.size()),
                         __FILE__, __LINE__);
      }
}

TEST(CargosGiveTheSameBitsWhateverTheChunks) {
  uint32_t seed = kSeed;
  for (const std::vector<int>& shape : kShapes)
    for (int64_t chunk : {64, 320, 1024, 1 << 20})
      for (int in_flight : {1, 3}) {
        ++seed;
        WithRanks(shape, {1024, in_flight, chunk}, seed, [&](Rank& r) {
          testing::CheckCargos(*r.communicator, seed,
                               "hierarchical, cargo chunks of " + std::to_string(chunk));
        });
      }
}

TEST(TheWindowIsAsSmallAsTheCargos) {
  WithRanks({2, 2}, {1024, 2, 1 << 20}, kSeed, [](Rank& r) {
    const auto reduce = [&](int64_t count) {
      const auto layout = std::make_shared<const Layout>(
          std::vector<reduce::Section>{{0, count, DType::kFloat32, ReduceOp::kSum}});
      const auto cargo =
          std::make_shared<testing::CheckedCargo>(std::vector<char>(size_t(layout->nbytes())));
      WorkPtr work = r.communicator->AllReduceCargo(layout, cargo);
      WaitFor(*work, r, "cargo");
      CHECK(cargo->whole());
      return cargo->largest;
    };
    CHECK_EQ(r.communicator->window_nbytes(), 0);
    reduce(4);
    CHECK_EQ(r.communicator->window_nbytes(), 3 * 4096);
    CHECK(reduce(4 << 20) <= 3 << 20);
    CHECK_EQ(r.communicator->window_nbytes(), 3 << 20);
  });
}

TEST(MoreChunksThanTags) {
  const auto results = ReduceAll({2, 2}, {64, 2}, kSeed, 1, 120);
  CHECK(results[0] == Serial({2, 2}, 0, 120));
}

TEST(AveragesOfHalvesKeepLargeAndSmall) {
  for (const std::vector<int>& shape : {std::vector<int>{2, 2, 2, 2}, {3, 2, 2}, {1, 4}, {2, 1}})
    WithRanks(shape, {}, kSeed, [&](Rank& r) {
      const auto layout = std::make_shared<const Layout>(
          std::vector<reduce::Section>{{0, 2, DType::kFloat16, ReduceOp::kAverage}});
      SegmentPtr segment = r.communicator->Alloc(layout->nbytes());
      uint16_t* data = static_cast<uint16_t*>(segment->data());
      data[0] = ToFloat16(40000).bits;
      data[1] = ToFloat16(1e-7f).bits;
      WorkPtr work = r.communicator->AllReduce(*segment, 0, layout);
      WaitFor(*work, r, "allreduce");
      const double residual = r.communicator->average_residual();
      const double large = ToFloat(Float16{data[0]}) * residual,
                   small = ToFloat(Float16{data[1]}) * residual;
      if ((r.size & (r.size - 1)) == 0 && shape.size() == 4) {
        CHECK_EQ(residual, 1.0);
        CHECK_EQ(large, 40000.0);
        CHECK_EQ(small, double{ToFloat(ToFloat16(1e-7f))});
      } else {
        // At most one rounding in the node, one a hop, each of 2^-11; the small one has a last
        // place of 2^-24 alone.
        CHECK(std::fabs(large / 40000 - 1) <= 4 * std::ldexp(1.0, -11));
        CHECK(small > 0 && small < 3e-7);
      }
    });
}

TEST(OtherCollectivesCoverAllRanks) {
  WithRanks({3, 2, 2}, {}, kSeed, [](Rank& r) {
    Communicator& c = *r.communicator;
    CHECK_EQ(c.rank(), r.rank);
    CHECK_EQ(c.size(), 7);
    const int32_t mine = r.rank * r.rank;
    std::vector<int32_t> all(7);
    WorkPtr work = c.AllGatherV(&mine, all.data(), std::vector<int64_t>(7, 4));
    WaitFor(*work, r, "allgather");
    for (int i = 0; i < 7; ++i) CHECK_EQ(all[static_cast<size_t>(i)], i * i);
    int64_t root = r.rank;
    work = c.Broadcast(&root, 8, 5);
    WaitFor(*work, r, "broadcast");
    CHECK_EQ(root, 5);

    // ReduceScatter and AllGather of parts that are not those of the nodes.
    const auto layout = std::make_shared<const Layout>(
        std::vector<reduce::Section>{{0, 333, DType::kInt32, ReduceOp::kSum}});
    SegmentPtr segment = c.Alloc(layout->nbytes());
    int32_t* data = static_cast<int32_t*>(segment->data());
    for (int i = 0; i < 333; ++i) data[i] = r.rank * 1000 + i;
    std::vector<reduce::Range> parts = reduce::Split(layout->nbytes(), 7);
    std::reverse(parts.begin(), parts.end());
    work = c.ReduceScatter(*segment, 0, layout, parts);
    WaitFor(*work, r, "reduce_scatter");
    const reduce::Range part = parts[static_cast<size_t>(r.rank)];
    for (int64_t i = part.begin / 4; i < std::min<int64_t>(part.end / 4, 333); ++i)
      CHECK_EQ(data[i], 21 * 1000 + 7 * static_cast<int32_t>(i));
    work = c.AllGather(*segment, 0, parts);
    WaitFor(*work, r, "allgather of parts");
    for (int i = 0; i < 333; ++i) CHECK_EQ(data[i], 21 * 1000 + 7 * i);
  });
}

TEST(AnAbortReachesEveryCall) {
  WithRanks({2, 2}, {64, 2}, kSeed, [](Rank& r) {
    const LayoutPtr layout = MixedLayout(1);
    SegmentPtr a = r.communicator->Alloc(layout->nbytes()),
               b = r.communicator->Alloc(layout->nbytes());
    std::memset(a->data(), 0, static_cast<size_t>(layout->nbytes()));
    std::memset(b->data(), 0, static_cast<size_t>(layout->nbytes()));
    if (r.rank == 3) return;  // never comes
    WorkPtr first = r.communicator->AllReduce(*a, 0, layout),
            second = r.communicator->AllReduce(*b, 0, layout);
    first->Poll();
    r.transport->Abort({Kind::kPeerLost, "rank 3 is gone"});
    CHECK_EQ(Wait(*second, *r.transport, kLimit, "second").message(),
             std::string("rank 3 is gone"));
    CHECK_EQ(Wait(*first, *r.transport, kLimit, "first").message(), std::string("rank 3 is gone"));
  });
}

TEST(WrongPartsAreNamed) {
  const auto hub = std::make_shared<LoopbackHub>(4);
  const auto transport = hub->MakeTransport(0);
  const Topology t = Topology::Make(0, {0, 0, 1, 1});
  const auto make = [&](std::vector<int> intra, std::vector<int> inter) {
    return MakeHierarchical(
        t, MakeAlgorithmCommunicator(*transport, std::move(intra), 2),
        inter.empty() ? nullptr : MakeAlgorithmCommunicator(*transport, std::move(inter), 3),
        MakeAlgorithmCommunicator(*transport, {0, 1, 2, 3}, 1), {});
  };
  CHECK_ERROR(make({0, 1, 2}, {0, 2}), Kind::kInternal, "the node's 2 ranks");
  CHECK_ERROR(make({0, 1}, {}), Kind::kInternal, "an inter communicator on the first 2 ranks");
  CHECK_ERROR(make({0, 1}, {2, 0}), Kind::kInternal, "in the nodes' order");
  CHECK(make({0, 1}, {0, 2})->name().find("between 2 nodes") != std::string::npos);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
