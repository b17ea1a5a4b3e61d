// Threads that play the ranks of a context, with a channel each.
#pragma once

#include <functional>
#include <memory>
#include <numeric>

#include "comm/loopback/world.h"
#include "diff/channel.h"
#include "faulty_transport.h"
#include "ranks.h"

namespace testing {

struct ChannelRank {
  gradred::diff::Channel& channel;
  FaultyTransport& messages;  // that the channel's messages go through
};

// Runs body in `size` threads. Finished messages are reported up to `delay` polls late, at random.
// A wait ends after 30 s.
inline void RunChannels(int size, int delay, const std::function<void(ChannelRank)>& body) {
  namespace diff = gradred::diff;
  const auto worlds = gradred::comm::MakeLoopbackWorlds(size);
  RunRanks(size, [&](int rank) {
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), 0);
    FaultyTransport transport(worlds[rank]->diff(), {7, delay, -1, -1});
    const auto traffic = std::make_shared<diff::Traffic>(transport);
    diff::Limits limits;
    limits.stall_fail = 30 * gradred::kSecond;
    diff::Channel channel(*worlds[rank], traffic, 0, "test", members, limits);
    channel.Begin("test", 0);
    body({channel, transport});
    channel.End();
  });
}

}  // namespace testing
