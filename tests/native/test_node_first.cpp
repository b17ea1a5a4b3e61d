// Short reductions with one rank a node outside, over loopback with late transfers.
#include <numeric>

#include "checked_cargo.h"
#include "comm/algorithm_communicator.h"
#include "comm/loopback/hub.h"
#include "comm/node_first.h"
#include "conformance.h"
#include "faulty_transport.h"
#include "ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

// body(communicator, transport) on every rank; node_of: ascending.
template <class Body>
void WithRanks(const std::vector<int>& node_of, int delay, Body body) {
  const int size = static_cast<int>(node_of.size());
  const auto hub = std::make_shared<LoopbackHub>(size);
  testing::RunRanks(size, [&](int rank) {
    const auto inner = hub->MakeTransport(rank);
    testing::FaultyTransport transport(*inner, {11, delay, -1, -1});
    const Topology t = Topology::Make(rank, node_of);
    std::vector<int> all(node_of.size()), first;
    std::iota(all.begin(), all.end(), 0);
    for (int n = 0; n < t.nodes(); ++n) first.push_back(t.RanksOfNode(n)[0]);
    const auto communicator = MakeNodeFirst(
        MakeAlgorithmCommunicator(transport, t.RanksOfNode(node_of[static_cast<size_t>(rank)]), 1),
        t.local_rank == 0 ? MakeAlgorithmCommunicator(transport, first, 2) : nullptr,
        MakeAlgorithmCommunicator(transport, all, 3));
    body(*communicator, transport);
  });
}

}  // namespace

TEST(Conforms) {
  for (const std::vector<int>& node_of :
       {std::vector<int>{0, 0}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 2, 2, 2}}) {
    WithRanks(node_of, 4, [](Communicator& communicator, Transport&) {
      conformance::ConformanceOptions options;
      options.name = "node first";
      conformance::CheckCommunicator(communicator, options);
      testing::CheckCargos(communicator, 5, "node first");
    });
  }
}

// The words of a round: one message out and one in for each other rank of the node and for each
// exchange between nodes.
TEST(OneRankANodeTalksOutside) {
  WithRanks({0, 0, 1, 1, 2, 2, 3, 3}, 0, [](Communicator& c, testing::FaultyTransport& transport) {
    const auto layout = std::make_shared<const reduce::Layout>(
        std::vector<reduce::Section>{{0, 24, DType::kUint8, reduce::ReduceOp::kBitAnd}});
    const SegmentPtr segment = c.Alloc(64);
    auto* words = static_cast<uint8_t*>(segment->data());
    std::fill_n(words, 24, static_cast<uint8_t>(0xff ^ (1 << c.rank())));
    const int before = transport.sends();
    const WorkPtr work = c.AllReduce(*segment, 0, layout);
    ThrowIfError(Wait(*work, transport, 60 * kSecond, "words"));
    for (int i = 0; i < 24; ++i) CHECK_EQ(int{words[i]}, 0);
    CHECK_EQ(transport.sends() - before, c.rank() % 2 == 0 ? 2 + 2 : 2);
  });
}

TEST(AnAbortReachesEveryCall) {
  WithRanks({0, 0, 1, 1}, 0, [](Communicator& c, testing::FaultyTransport& transport) {
    if (c.rank() == 3) return;  // never comes
    const auto layout = std::make_shared<const reduce::Layout>(
        std::vector<reduce::Section>{{0, 24, DType::kUint8, reduce::ReduceOp::kBitAnd}});
    const SegmentPtr a = c.Alloc(64), b = c.Alloc(64);
    const WorkPtr first = c.AllReduce(*a, 0, layout), second = c.AllReduce(*b, 0, layout);
    transport.Abort({Kind::kPeerLost, "rank 3 is gone"});
    for (Work* work : {second.get(), first.get()}) {
      CHECK_EQ(Wait(*work, transport, 60 * kSecond, "words").message(),
               std::string("rank 3 is gone"));
    }
  });
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
