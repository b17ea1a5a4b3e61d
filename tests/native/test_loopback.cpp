// The loopback transport and world, and the algorithms over them, by the conformance suite and by
// faults.
#include <atomic>
#include <numeric>

#include "checked_cargo.h"
#include "comm/algorithm_communicator.h"
#include "comm/loopback/hub.h"
#include "comm/loopback/world.h"
#include "conformance.h"
#include "faulty_transport.h"
#include "ranks.h"

using namespace gradred;

namespace {

constexpr Nanos kLimit = 30 * kSecond;

conformance::ConformanceOptions Named(const std::string& name) {
  conformance::ConformanceOptions options;
  options.name = name;
  return options;
}

std::vector<int> Everybody(int size) {
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return members;
}

std::vector<comm::AlgorithmRow> Always(comm::Algorithm reduce, comm::Algorithm gather) {
  return {{"allreduce", 0, reduce, ""}, {"allgather", 0, gather, ""}};
}

// A segment with one float32 section of ones, as long as `nbytes`.
struct Ones {
  Ones(comm::Communicator& communicator, int64_t nbytes)
      : segment(communicator.Alloc(nbytes)),
        layout(std::make_shared<reduce::Layout>(std::vector<reduce::Section>{
            {0, nbytes / 4, DType::kFloat32, reduce::ReduceOp::kSum}})) {
    std::fill_n(static_cast<float*>(segment->data()), nbytes / 4, 1.0f);
  }
  comm::SegmentPtr segment;
  comm::LayoutPtr layout;
};

}  // namespace

TEST(TransportConforms) {
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    const auto hub = std::make_shared<comm::LoopbackHub>(size);
    testing::RunRanks(size, [&](int rank) {
      const auto transport = hub->MakeTransport(rank);
      conformance::CheckTransport(*transport, Named("loopback transport"));
    });
  }
}

TEST(TransportConformsWithTransfersThatFinishInAnyOrder) {
  for (const int size : {1, 3, 4}) {
    const auto hub = std::make_shared<comm::LoopbackHub>(size);
    testing::RunRanks(size, [&](int rank) {
      const auto inner = hub->MakeTransport(rank);
      testing::FaultyTransport transport(*inner, {7, 5, -1, -1});
      conformance::CheckTransport(transport, Named("late loopback transport"));
    });
  }
}

TEST(CommunicatorConforms) {
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const auto worlds = comm::MakeLoopbackWorlds(size);
    testing::RunRanks(size, [&](int rank) {
      comm::World& world = *worlds[rank];
      conformance::CheckCommunicator(*world.MakeData(Everybody(size), 0), Named("flat data"));
      conformance::CheckCommunicator(*world.MakeControl(Everybody(size), 0), Named("control"));
      world.Close();
    });
  }
}

TEST(EveryAlgorithmConforms) {
  using comm::Algorithm;
  const std::pair<Algorithm, Algorithm> choices[] = {
      {Algorithm::kRing, Algorithm::kBruck},
      {Algorithm::kRecursiveDoubling, Algorithm::kBruck},
      {Algorithm::kRecursiveHalving, Algorithm::kPairwise},
      {Algorithm::kPairwise, Algorithm::kPairwise},
  };
  for (const auto& [reduce, gather] : choices) {
    comm::LoopbackOptions loopback;
    loopback.algorithm_options = {Always(reduce, gather), 1000};
    auto options = Named(std::string(AlgorithmName(reduce)) + " and " + AlgorithmName(gather));
    options.ordered = IsReproducible(reduce);
    for (const int size : {2, 3, 4, 5, 6, 7, 8}) {
      const auto worlds = comm::MakeLoopbackWorlds(size, loopback);
      testing::RunRanks(size, [&](int rank) {
        conformance::CheckCommunicator(*worlds[rank]->MakeData(Everybody(size), 0), options);
      });
    }
  }
}

// Sends of one rank of four: 2 for recursive doubling, 2 + 2 for halving and doubling, 3 + 3 for
// pairwise.
TEST(TableChoosesTheAlgorithm) {
  using comm::Algorithm;
  const std::vector<comm::AlgorithmRow> rows = {
      {"allreduce", 0, Algorithm::kRecursiveDoubling, ""},
      {"allreduce", 4096, Algorithm::kPairwise, ""},
      {"allreduce", 1024, Algorithm::kRecursiveHalving, ""}};
  const auto hub = std::make_shared<comm::LoopbackHub>(4);
  testing::RunRanks(4, [&](int rank) {
    const auto inner = hub->MakeTransport(rank);
    testing::FaultyTransport transport(*inner, {});
    const auto communicator =
        comm::MakeAlgorithmCommunicator(transport, Everybody(4), 0, {rows, 1 << 20});
    int before = 0;
    for (const auto& [nbytes, sends] : std::vector<std::pair<int64_t, int>>{
             {0, 0}, {960, 2}, {1024, 4}, {4032, 4}, {4096, 6}, {8192, 6}}) {
      Ones ones(*communicator, nbytes);
      auto work = communicator->AllReduce(*ones.segment, 0, ones.layout);
      ThrowIfError(Wait(*work, transport, kLimit, "allreduce"));
      testing::CheckEq(transport.sends() - before, sends, "sends", __FILE__, __LINE__);
      before = transport.sends();
    }
  });
}

TEST(CommunicatorConformsWithTransfersThatFinishInAnyOrder) {
  for (const int size : {3, 4, 6}) {
    for (const uint64_t seed : {1, 2}) {
      const auto hub = std::make_shared<comm::LoopbackHub>(size);
      testing::RunRanks(size, [&](int rank) {
        const auto inner = hub->MakeTransport(rank);
        testing::FaultyTransport transport(*inner, {seed, 3, -1, -1});
        const auto communicator = comm::MakeAlgorithmCommunicator(transport, Everybody(size), 8);
        conformance::CheckCommunicator(*communicator,
                                       Named("late transfers, seed " + std::to_string(seed)));
      });
    }
  }
}

TEST(CargosGiveTheSameBitsWhateverTheChunks) {
  for (const int size : {1, 2, 3, 5, 6, 8}) {
    for (const int64_t chunk : {64, 1024, 1 << 20}) {
      for (const int in_flight : {1, 4}) {
        const auto hub = std::make_shared<comm::LoopbackHub>(size);
        testing::RunRanks(size, [&](int rank) {
          const auto inner = hub->MakeTransport(rank);
          testing::FaultyTransport transport(*inner, {5, 3, -1, -1});
          comm::AlgorithmOptions options;
          options.chunk_nbytes = chunk;
          options.chunks_in_flight = in_flight;
          const auto communicator =
              comm::MakeAlgorithmCommunicator(transport, Everybody(size), 8, options);
          testing::CheckCargos(*communicator, 1, "late transfers, chunks " + std::to_string(chunk));
          const int64_t kept = communicator->window_nbytes();
          testing::Check(kept < 16 << 20, "the window is bounded", __FILE__, __LINE__);
        });
      }
    }
  }
}

// Two sets that overlap in one rank and a set in another order than the world's, all at once.
TEST(CommunicatorsOfSubsetsAreApart) {
  const auto worlds = comm::MakeLoopbackWorlds(5);
  testing::RunRanks(5, [&](int rank) {
    comm::World& world = *worlds[rank];
    const auto check = [&](std::vector<int> members, uint16_t channel) {
      if (std::find(members.begin(), members.end(), rank) == members.end()) return;
      const auto communicator =
          comm::MakeAlgorithmCommunicator(world.data(), std::move(members), channel);
      conformance::CheckCommunicator(*communicator, Named("set " + std::to_string(channel)));
    };
    check({0, 1, 2}, 4);
    check({2, 3, 4}, 8);
    check({4, 0, 3, 1}, 12);
  });
}

TEST(HierarchicalConforms) {
  const std::vector<std::vector<int>> machines = {
      {0},          {0, 0, 0}, {0, 1, 2},          {0, 0, 1, 1}, {0, 0, 0, 0, 1, 1, 1, 1},
      {0, 1, 0, 1}, {0, 0, 1}, {0, 0, 0, 1, 1, 2},
  };
  for (const std::vector<int>& node_of : machines) {
    comm::LoopbackOptions loopback;
    loopback.node_of = node_of;
    loopback.hierarchical = true;
    loopback.hierarchical_options.chunk_nbytes = 4096;
    auto options = Named("hierarchical(loopback, loopback), nodes");
    for (const int node : node_of) options.name += " " + std::to_string(node);
    options.node_of = node_of;
    options.ordered = false;  // in a node of messages the sum is a tree of hops
    const int size = static_cast<int>(node_of.size());
    const auto worlds = comm::MakeLoopbackWorlds(size, loopback);
    testing::RunRanks(size, [&](int rank) {
      conformance::CheckCommunicator(*worlds[rank]->MakeData(Everybody(size), 0), options);
      worlds[rank]->Close();
    });
  }
}

TEST(BarrierHoldsUntilAllHaveCome) {
  for (const int size : {2, 3, 5, 8}) {
    const auto worlds = comm::MakeLoopbackWorlds(size);
    std::atomic<int> entered{0};
    testing::RunRanks(size, [&](int rank) {
      const auto communicator = worlds[rank]->MakeControl(Everybody(size), 0);
      for (int round = 1; round <= 50; ++round) {
        ++entered;
        const auto barrier = communicator->Barrier();
        ThrowIfError(Wait(*barrier, communicator->transport(), kLimit, "barrier"));
        testing::Check(entered >= round * size, "left before all had come", __FILE__, __LINE__);
        // Nobody enters round + 1 before all have looked.
        const auto again = communicator->Barrier();
        ThrowIfError(Wait(*again, communicator->transport(), kLimit, "barrier"));
      }
    });
  }
}

TEST(ShortMessageFailsTheCollective) {
  const auto hub = std::make_shared<comm::LoopbackHub>(4);
  std::atomic<int> named{0};
  testing::RunRanks(4, [&](int rank) {
    const auto inner = hub->MakeTransport(rank);
    testing::FaultyTransport transport(*inner, {1, 0, rank == 2 ? 1 : -1, -1});
    const auto communicator = comm::MakeAlgorithmCommunicator(transport, Everybody(4), 0);
    Ones ones(*communicator, 256);
    auto work = communicator->AllReduce(*ones.segment, 0, ones.layout);
    const Status status = Wait(*work, transport, kSecond / 2, "allreduce");
    if (status.kind() == Kind::kTransportError) {
      CHECK(status.message().find("from rank 2") != std::string::npos);
      CHECK(status.message().find("expected 256 bytes, got 255") != std::string::npos);
      ++named;
    }
    transport.Abort({Kind::kInternal, "end of the test"});
  });
  CHECK(named >= 1);
}

TEST(AbortEndsCollectivesWithTheFirstCause) {
  const auto worlds = comm::MakeLoopbackWorlds(3);
  testing::RunRanks(3, [&](int rank) {
    if (rank == 2) return;  // never comes
    comm::World& world = *worlds[rank];
    const auto communicator = world.MakeData(Everybody(3), 0);
    Ones ones(*communicator, 64'000);
    std::string blob = "x";
    std::vector<comm::WorkPtr> works;
    works.push_back(communicator->AllReduce(*ones.segment, 0, ones.layout));
    works.push_back(communicator->Barrier());
    works.push_back(communicator->Union(&blob, [](auto& a, auto& b) { return a + b; }));
    const auto first = Wait(*works[0], world.data(), 10 * kMillisecond, "allreduce");
    CHECK_EQ(KindName(first.kind()), KindName(Kind::kTimeout));
    CHECK(first.message().find("rank " + std::to_string(rank) + ": allreduce") == 0);
    std::thread other([&] {
      world.Abort({Kind::kPeerLost, "rank 2 is lost"});
      world.Abort({Kind::kInternal, "later"});
    });
    for (auto& work : works) {
      const Status status = Wait(*work, world.data(), kLimit, "aborted work");
      CHECK_EQ(status.ToString(), Status(Kind::kPeerLost, "rank 2 is lost").ToString());
    }
    other.join();
  });
}

TEST(KilledRankIsReportedAndSilent) {
  const auto worlds = comm::MakeLoopbackWorlds(3);
  worlds[1]->data().Send(0, {0, 0}, "x", 1)->Poll();
  comm::KillLoopbackRank(*worlds[0], 1);
  worlds[1]->data().Send(0, {0, 0}, "x", 1)->Poll();
  worlds[1]->side().Post(0, "x");
  char byte = 0;
  const auto receive = worlds[0]->data().Recv(1, {0, 0}, &byte, 1);
  comm::Message message;
  CHECK(!receive->Poll());
  CHECK(!worlds[0]->side().TakePosted(&message));
  const auto lost = worlds[2]->CheckPeers();
  CHECK(lost.has_value());
  CHECK_EQ(KindName(lost->status.kind()), KindName(Kind::kPeerLost));
  CHECK(lost->status.message().find("rank 1") == 0);
  worlds[0]->Abort(lost->status);
  CHECK(receive->Poll());
}

TEST(LeavingWithoutCloseIsALoss) {
  auto worlds = comm::MakeLoopbackWorlds(3);
  CHECK(!worlds[0]->CheckPeers().has_value());
  testing::RunRanks(3, [&](int rank) {
    worlds[rank]->Close();
    if (rank == 2) worlds[rank].reset();
  });
  CHECK(!worlds[0]->CheckPeers().has_value());

  worlds = comm::MakeLoopbackWorlds(2);
  worlds[1].reset();
  CHECK(worlds[0]->CheckPeers().has_value());
}

TEST(BootstrapMeetsAndTimesOut) {
  const auto bootstraps = comm::MakeLoopbackBootstraps(4, kLimit);
  testing::RunRanks(4, [&](int rank) {
    for (int round = 0; round < 100; ++round) {
      const std::string text = std::to_string(round) + "/";
      const auto all = bootstraps[rank]->AllGather(text + std::to_string(rank));
      for (int r = 0; r < 4; ++r) CHECK_EQ(all[r], text + std::to_string(r));
    }
  });
  const auto alone = comm::MakeLoopbackBootstraps(2, kMillisecond);
  CHECK_ERROR(alone[1]->AllGather("x"), Kind::kTimeout, "rank 1: 1 of 2 ranks met within 1 ms");
}

TEST(MessageWakesASleeper) {
  const auto hub = std::make_shared<comm::LoopbackHub>(2);
  testing::RunRanks(2, [&](int rank) {
    const auto transport = hub->MakeTransport(rank);
    for (int64_t i = 0; i < 200; ++i) {  // ping-pong: a lost ring would cost the time limit
      int64_t got = -1;
      const auto receive = transport->Recv(1 - rank, {0, 0}, &got, sizeof got);
      if (rank == 1) ThrowIfError(Wait(*receive, *transport, kLimit, "ping"));
      const auto send = transport->Send(1 - rank, {0, 0}, &i, sizeof i);
      ThrowIfError(Wait(*send, *transport, kLimit, "send"));
      ThrowIfError(Wait(*receive, *transport, kLimit, "pong"));
      testing::CheckEq(got, i, "got == i", __FILE__, __LINE__);
    }
  });
}

TEST(WrongArgumentsAreNamed) {
  const auto worlds = comm::MakeLoopbackWorlds(2);
  const auto c = worlds[1]->MakeData({0, 1}, 0);
  Ones ones(*c, 256);
  CHECK_ERROR(c->AllReduce(*ones.segment, 32, ones.layout), Kind::kInvalidArgument,
              "rank 1: allreduce: offset in the segment: expected a multiple of 64, got 32");
  CHECK_ERROR(c->AllReduce(*ones.segment, 64, ones.layout), Kind::kInvalidArgument,
              "end in the segment: expected at most 256, got 320");
  CHECK_ERROR(c->ReduceScatter(*ones.segment, 0, ones.layout, {{0, 256}}), Kind::kInvalidArgument,
              "parts: expected 2, got 1");
  CHECK_ERROR(c->ReduceScatter(*ones.segment, 0, ones.layout, {{0, 100}, {128, 256}}),
              Kind::kInvalidArgument, "end of a part from 0");
  CHECK_ERROR(c->Broadcast(nullptr, 0, 2), Kind::kInvalidArgument, "expected 0 ... 1, got 2");
  CHECK_ERROR(c->AllGatherV(nullptr, nullptr, {1, -1}), Kind::kInvalidArgument, "0 or more");
  CHECK_ERROR(worlds[1]->MakeData({0}, 0), Kind::kInvalidArgument,
              "a communicator without its own");
  CHECK_ERROR(worlds[0]->data().Send(2, {0, 0}, nullptr, 0), Kind::kInvalidArgument, "rank 2 of 2");
  CHECK_ERROR(worlds[0]->data().Post(1, std::string(comm::kMaxDatagram + 1, 'x')),
              Kind::kInvalidArgument, "expected at most 4096 bytes, got 4097");
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
