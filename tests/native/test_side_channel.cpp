// How the ranks hear of what ends the engine: the side channel, and the control loop's use of it.
#include <sched.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/text.h"
#include "engine/side_channel.h"
#include "engine_ranks.h"
#include "faulty_transport.h"
#include "forwarding_world.h"

using namespace gradred;
using namespace gradred::engine;
using testing::OnRanks;
using testing::Reduce;

namespace {

constexpr Nanos kDeadline = 30 * kSecond;

Status AwaitFailure(Engine& engine) {
  for (const Nanos until = Now() + kDeadline; engine.failure().ok() && Now() < until;)
    sched_yield();
  return engine.failure();
}

// Ranks by node, of which those in `killed` end at once after a reduction; what the others get.
std::vector<std::string> CausesAfter(const std::vector<int>& node_of, const std::set<int>& killed) {
  comm::LoopbackOptions loopback;
  loopback.node_of = node_of;
  loopback.see_own_node = true;
  const int n = static_cast<int>(node_of.size());
  std::vector<std::string> causes(n);
  std::atomic<int> reduced{0}, heard{0};
  const auto await = [](const std::atomic<int>& count, int wanted) {
    for (const Nanos until = Now() + kDeadline; count < wanted && Now() < until;) sched_yield();
    CHECK_EQ(count.load(), wanted);
  };
  OnRanks(
      n,
      [&](Engine& engine, int r) {
        CHECK_EQ(Reduce(engine, "x", {1})[0], float(n));
        ++reduced;
        await(reduced, n);
        if (killed.count(r) > 0) {
          comm::KillLoopbackRank(engine.world(), r);
          return await(heard, n - static_cast<int>(killed.size()));  // as a process would be gone
        }
        causes[r] = AwaitFailure(engine).ToString();
        ++heard;
      },
      {}, false, nullptr, loopback);
  return causes;
}

// Fails in every call from the moment at which somebody is lost, as MPI may.
class FragileTransport final : public testing::FaultyTransport {
 public:
  FragileTransport(comm::Transport& inner, comm::World& world)
      : FaultyTransport(inner, {}), world_(world) {}
  void Post(int peer, const std::string& bytes) override {
    MaybeFail("a send");
    FaultyTransport::Post(peer, bytes);
  }
  bool TakePosted(comm::Message* message) override {
    MaybeFail("a probe");
    return FaultyTransport::TakePosted(message);
  }
  void Progress() override {
    MaybeFail("a test");
    FaultyTransport::Progress();
  }

 private:
  void MaybeFail(const std::string& what) {
    if (world_.CheckPeers()) throw Error(Kind::kTransportError, what + " failed");
  }
  comm::World& world_;
};

class FragileWorld final : public testing::ForwardingWorld {
 public:
  explicit FragileWorld(std::unique_ptr<comm::World> world)
      : ForwardingWorld(std::move(world)), side_(base().side(), base()) {}
  comm::Transport& side() override { return side_; }

 private:
  FragileTransport side_;
};

}  // namespace

TEST(ATreeGoesRoundTheLost) {
  constexpr int kRanks = 6;
  for (int root = 0; root < kRanks; ++root)
    for (const std::set<int>& lost :
         std::vector<std::set<int>>{{}, {1}, {0, 3}, {0, 1, 2, 3, 4, 5}}) {
      const auto worlds = comm::MakeLoopbackWorlds(kRanks);
      std::vector<SideChannel> sides;
      for (const auto& world : worlds) sides.emplace_back(world->side());
      std::vector<int> notices(kRanks, 0);
      AbortNotice notice{root, Kind::kPeerLost, "some are lost", lost};
      sides[root].Announce(notice);
      for (bool any = true; any;) {
        any = false;
        for (int r = 0; r < kRanks; ++r) {
          if (lost.count(r) > 0) continue;
          any |= sides[r].Poll({[&, r](const AbortNotice& got) {
                                  ++notices[r];
                                  CHECK(got.lost == lost);
                                  CHECK_EQ(got.text, notice.text);
                                  CHECK_EQ(got.origin, root);
                                },
                                {},
                                {}});
        }
      }
      for (int r = 0; r < kRanks; ++r) CHECK_EQ(notices[r], r != root && lost.count(r) == 0);
    }
}

TEST(AllHearOfALossOnAnotherNode) {
  // Of those that are lost only rank 0 knows, and ranks 3 and 5 hang below it in a tree from 0.
  const auto one = CausesAfter({0, 0, 1, 2, 3, 4}, {1});
  // The two that see a loss do not see the other's.
  const auto two = CausesAfter({0, 0, 1, 1, 2, 3, 4, 5}, {1, 3});
  for (const int r : {0, 2, 3, 4, 5}) {
    CHECK_EQ(one[r], one[0]);
    CHECK(one[r].find("PeerLost: rank 1 ") == 0);
  }
  for (const int r : {0, 2, 4, 5, 6, 7}) CHECK(two[r].find("PeerLost: rank ") == 0);
}

TEST(ASideChannelThatFailsHidesNoLoss) {
  std::atomic<int> alive{0}, ended{0};
  comm::World* dying = nullptr;
  OnRanks(
      3,
      [&](Engine& engine, int r) {
        CHECK_EQ(Reduce(engine, "x", {1})[0], 3.0f);
        ++alive;
        while (alive < 3) sched_yield();
        if (r == 2) {
          comm::KillLoopbackRank(*dying, r);
          while (ended < 2) sched_yield();
          return;
        }
        try {
          Reduce(engine, "y", {1});
          throw testing::Failure("no error");
        } catch (const Error& e) {
          ++ended;
          CHECK_EQ(std::string(KindName(e.kind())), "PeerLost");
          CHECK(std::string(e.what()).find("rank 2") != std::string::npos);
        }
      },
      {}, false,
      [&dying](std::unique_ptr<comm::World> world) {
        if (world->topology().rank == 2) dying = world.get();
        return std::make_unique<FragileWorld>(std::move(world));
      });
}

TEST(AStallOfALongNameNamesWhoLacksIt) {
  EngineOptions options;
  options.stall_fail = kSecond;
  const std::string name(5000, 'n');
  OnRanks(
      3,
      [&](Engine& engine, int r) {
        if (r > 0) {
          try {
            Reduce(engine, name, {1});
            throw testing::Failure("no error");
          } catch (const Error&) {
          }
        }
        const std::string text = AwaitFailure(engine).ToString();
        CHECK(text.find("Timeout: rank ") == 0);
        CHECK(text.find("'nnn") != std::string::npos);
        CHECK(text.find("not submitted by rank 0;") != std::string::npos);
      },
      options, false);
}

TEST(ShortenedTextsKeepTheirCharacters) {
  CHECK_EQ(Shortened("12345678", 8), "12345678");
  CHECK_EQ(Shortened("123456789", 8), "12345...");
  const std::string text = "1234\u00e9\u20ac\U0001f600";  // of 1, 2, 3 and 4 bytes
  CHECK_EQ(Shortened(text, 12), "1234\u00e9\u20ac...");
  CHECK_EQ(Shortened(text, 11), "1234\u00e9...");
  CHECK_EQ(Shortened(text, 8), "1234...");
  for (size_t longest = 3; longest < 20; ++longest)
    CHECK_EQ(Shortened(Shortened(text, longest), longest), Shortened(text, longest));
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
