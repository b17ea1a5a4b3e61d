#include "comm/communicator.h"
#include "testing.h"

using gradred::Kind;
using gradred::comm::Topology;

TEST(OneNode) {
  const Topology t = Topology::Make(2, {5, 5, 5, 5});
  CHECK_EQ(t.size, 4);
  CHECK_EQ(t.nodes(), 1);
  CHECK_EQ(t.local_rank, 2);
  CHECK_EQ(t.local_size, 4);
  CHECK_EQ(t.cross_rank, 0);
  CHECK_EQ(t.cross_size, 1);
  CHECK(t.homogeneous);
}

TEST(NodesAreNumberedByTheirLowestRank) {
  const Topology t = Topology::Make(3, {7, 2, 7, 2, 0, 0});
  CHECK(t.node_of == (std::vector<int>{0, 1, 0, 1, 2, 2}));
  CHECK_EQ(t.local_rank, 1);
  CHECK_EQ(t.local_size, 2);
  CHECK_EQ(t.cross_rank, 1);
  CHECK_EQ(t.cross_size, 3);
  CHECK(t.homogeneous);
  CHECK(t.RanksOfNode(1) == (std::vector<int>{1, 3}));
}

TEST(CrossRanksSkipNodesThatAreTooSmall) {
  // Nodes of 3, 1 and 2 ranks: local rank 1 exists in the first and the last.
  const std::vector<int> node_of = {0, 0, 0, 1, 2, 2};
  const Topology last = Topology::Make(5, node_of);
  CHECK_EQ(last.local_rank, 1);
  CHECK_EQ(last.cross_rank, 1);
  CHECK_EQ(last.cross_size, 2);
  CHECK(!last.homogeneous);
  const Topology third = Topology::Make(2, node_of);
  CHECK_EQ(third.local_rank, 2);
  CHECK_EQ(third.cross_rank, 0);
  CHECK_EQ(third.cross_size, 1);
  const Topology alone = Topology::Make(3, node_of);
  CHECK_EQ(alone.cross_rank, 1);
  CHECK_EQ(alone.cross_size, 3);
}

TEST(EveryRankOfACrossGroupHasItsOwnPlace) {
  const std::vector<int> node_of = {0, 1, 1, 2, 0, 1, 2, 2, 2};
  std::vector<std::vector<int>> ranks_at;  // [local_rank], in the order of cross_rank
  for (int node = 0; node < 3; ++node) {
    for (int r = 0; r < 9; ++r) {
      const Topology t = Topology::Make(r, node_of);
      if (t.node_of[r] != node) continue;
      if (t.local_rank >= static_cast<int>(ranks_at.size())) ranks_at.resize(t.local_rank + 1);
      CHECK_EQ(t.cross_rank, static_cast<int>(ranks_at[t.local_rank].size()));
      ranks_at[t.local_rank].push_back(r);
    }
  }
  for (int r = 0; r < 9; ++r) {
    const Topology t = Topology::Make(r, node_of);
    CHECK_EQ(t.cross_size, static_cast<int>(ranks_at[t.local_rank].size()));
  }
}

TEST(RestrictKeepsTheNodesOfTheMembers) {
  const Topology world = Topology::Make(4, {0, 0, 1, 1, 2, 2});
  const Topology set = world.Restrict({1, 4, 5});
  CHECK_EQ(set.rank, 1);
  CHECK_EQ(set.size, 3);
  CHECK(set.node_of == (std::vector<int>{0, 1, 1}));
  CHECK_EQ(set.local_rank, 0);
  CHECK_EQ(set.local_size, 2);
  CHECK(!set.homogeneous);
  const Topology alone = world.Restrict({4});
  CHECK_EQ(alone.size, 1);
  CHECK_EQ(alone.nodes(), 1);
}

TEST(WrongRanksAreNamed) {
  CHECK_ERROR(Topology::Make(2, {0, 0}), Kind::kInvalidArgument, "rank 2 is not in 0 ... 1");
  const Topology world = Topology::Make(0, {0, 0, 1});
  CHECK_ERROR(world.Restrict({1, 2}), Kind::kInvalidArgument, "rank 0 is no member");
  CHECK_ERROR(world.Restrict({0, 3}), Kind::kInvalidArgument, "names rank 3 of a world of size 3");
}

TEST(DefaultIsARankAlone) {
  CHECK_EQ(Topology().nodes(), 1);
  CHECK_EQ(Topology().size, 1);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
