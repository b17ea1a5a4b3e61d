#include <algorithm>
#include <map>

#include "comm/communicator.h"

namespace gradred::comm {

Topology Topology::Make(int rank, std::vector<int> node_of) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(node_of.size());
  if (rank < 0 || rank >= topology.size) {
    throw Error(Kind::kInvalidArgument, "topology: rank " + std::to_string(rank) +
                                            " is not in 0 ... " +
                                            std::to_string(topology.size - 1));
  }
  std::map<int, int> number;  // the caller's name of a node -> its number here
  std::vector<int> local_sizes;
  for (int& node : node_of) {
    node = number.emplace(node, static_cast<int>(number.size())).first->second;
    if (node == static_cast<int>(local_sizes.size())) local_sizes.push_back(0);
    ++local_sizes[node];
  }
  const int node = node_of[rank];
  topology.local_size = local_sizes[node];
  topology.local_rank = static_cast<int>(std::count(node_of.begin(), node_of.begin() + rank, node));
  const auto has_my_local_rank = [&](int n) { return n > topology.local_rank; };
  topology.cross_rank = static_cast<int>(
      std::count_if(local_sizes.begin(), local_sizes.begin() + node, has_my_local_rank));
  topology.cross_size =
      static_cast<int>(std::count_if(local_sizes.begin(), local_sizes.end(), has_my_local_rank));
  const auto [least, most] = std::minmax_element(local_sizes.begin(), local_sizes.end());
  topology.homogeneous = *least == *most;
  topology.node_of = std::move(node_of);
  return topology;
}

int Topology::nodes() const {
  return node_of.empty() ? 1 : 1 + *std::max_element(node_of.begin(), node_of.end());
}

Topology Topology::Restrict(const std::vector<int>& members) const {
  const auto mine = std::find(members.begin(), members.end(), rank);
  if (mine == members.end()) {
    throw Error(Kind::kInvalidArgument,
                "rank " + std::to_string(rank) + " is no member of the process set");
  }
  std::vector<int> nodes;
  for (const int member : members) {
    if (member < 0 || member >= size) {
      throw Error(Kind::kInvalidArgument,
                  "rank " + std::to_string(rank) + ": a process set names rank " +
                      std::to_string(member) + " of a world of size " + std::to_string(size));
    }
    nodes.push_back(node_of[member]);
  }
  return Make(static_cast<int>(mine - members.begin()), std::move(nodes));
}

std::vector<int> Topology::RanksOfNode(int node) const {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) {
    if (node_of[r] == node) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace gradred::comm
