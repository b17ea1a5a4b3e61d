#include "comm/algorithm_communicator.h"
#include "comm/loopback/hub.h"
#include "comm/loopback/world.h"
#include "conformance.h"
#include "ranks.h"

using namespace gradred;

namespace {

conformance::ConformanceOptions Named(const std::string& name) {
  conformance::ConformanceOptions options;
  options.name = name;
  return options;
}

}  // namespace

TEST(TransportConforms) {
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    const auto hub = std::make_shared<comm::LoopbackHub>(size);
    const auto options = Named("loopback transport");
    testing::RunRanks(size, [&](int rank) {
      const auto transport = hub->MakeTransport(rank);
      conformance::CheckTransport(*transport, options);
    });
  }
}

TEST(CommunicatorConforms) {
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const auto worlds = comm::MakeLoopbackWorlds(size);
    const auto options = Named("flat over loopback");
    testing::RunRanks(size, [&](int rank) {
      std::vector<int> members(size);
      std::iota(members.begin(), members.end(), 0);
      conformance::CheckCommunicator(*worlds[rank]->MakeData(members, 0), options);
      worlds[rank]->Close();
    });
  }
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
