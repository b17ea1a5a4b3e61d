#include "comm/loopback/world.h"

#include <algorithm>
#include <atomic>

#include "comm/loopback/hub.h"

namespace gradred::comm {
namespace {

constexpr int kTransports = 4;  // control, data, side, diff

enum class Life : uint8_t { kAlive, kClosed, kKilled, kGone };

// What the worlds of one job share.
struct Job {
  Job(int size, LoopbackOptions o) : options(std::move(o)), life(size) {
    static std::atomic<uint64_t> count{0};
    nonce = ++count;
    for (auto& hub : hubs) hub = std::make_shared<LoopbackHub>(size);
    for (auto& l : life) l = Life::kAlive;
  }
  const LoopbackOptions options;
  uint64_t nonce = 0;
  std::shared_ptr<LoopbackHub> hubs[kTransports];
  std::vector<std::atomic<Life>> life;
};

class LoopbackWorld : public World {
 public:
  LoopbackWorld(std::shared_ptr<Job> job, Topology topology, std::unique_ptr<Bootstrap> bootstrap)
      : job_(std::move(job)), topology_(std::move(topology)), bootstrap_(std::move(bootstrap)) {
    for (int i = 0; i < kTransports; ++i)
      transports_[i] = job_->hubs[i]->MakeTransport(topology_.rank);
  }
  ~LoopbackWorld() override {
    Life alive = Life::kAlive;
    job_->life[topology_.rank].compare_exchange_strong(alive, Life::kGone);
  }

  const Topology& topology() const override { return topology_; }
  uint64_t nonce() const override { return job_->nonce; }
  std::string Describe() const override {
    return "threads of one process, " + std::to_string(topology_.nodes()) + " virtual node(s)" +
           (job_->options.hierarchical ? ", hierarchical" : "");
  }
  Transport& control() override { return *transports_[0]; }
  Transport& data() override { return *transports_[1]; }
  Transport& side() override { return *transports_[2]; }
  Transport& diff() override { return *transports_[3]; }

  std::unique_ptr<Communicator> MakeControl(const std::vector<int>& members, int lane) override {
    return Make(control(), members, lane, 0);
  }
  std::unique_ptr<Communicator> MakeData(const std::vector<int>& members, int lane) override {
    return MakeForTensors(data(), members, lane);
  }
  std::unique_ptr<Communicator> MakeDiff(const std::vector<int>& members, int context) override {
    return MakeForTensors(diff(), members, context);
  }

  int64_t network_nbytes() const override { return 0; }  // there is none

  // As of processes of one machine; with `see_own_node`, of one node.
  std::optional<LostPeers> CheckPeers() override {
    LostPeers lost;
    std::string text;
    for (int r = 0; r < topology_.size; ++r) {
      const Life life = job_->life[r];
      if (r == topology_.rank || life == Life::kAlive || life == Life::kClosed) continue;
      if (job_->options.see_own_node && topology_.node_of[r] != topology_.node_of[topology_.rank])
        continue;
      lost.ranks.push_back(r);
      if (life == Life::kKilled) lost.silent.push_back(r);
      text += (text.empty() ? "rank " : "; rank ") + std::to_string(r) +
              " (a thread of this process) " +
              (life == Life::kKilled ? "was killed by the test" : "ended without closing");
    }
    if (lost.ranks.empty()) return std::nullopt;
    lost.status = {Kind::kPeerLost, text};
    return lost;
  }

  void Wait(Work& work, Nanos timeout, const std::string& what) override {
    ThrowIfError(comm::Wait(work, control(), timeout, what));
  }

  void Close() override {
    bootstrap_->AllGather("");  // so that nobody is seen leaving by a rank that still works
    Life alive = Life::kAlive;
    job_->life[topology_.rank].compare_exchange_strong(alive, Life::kClosed);
  }
  void Abort(const Status& cause) override {
    for (auto& transport : transports_) transport->Abort(cause);
  }

  void Kill(int rank) {
    job_->life[rank] = Life::kKilled;
    for (auto& hub : job_->hubs) hub->Kill(rank);
  }

 private:
  std::unique_ptr<Communicator> MakeForTensors(Transport& transport,
                                               const std::vector<int>& members, int lane) const;
  std::unique_ptr<Communicator> Make(Transport& transport, std::vector<int> members, int lane,
                                     int use) const {
    return MakeAlgorithmCommunicator(transport, std::move(members),
                                     static_cast<uint16_t>(kChannelsPerSet * lane + use),
                                     job_->options.algorithm_options);
  }

  const std::shared_ptr<Job> job_;
  const Topology topology_;
  const std::unique_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<Transport> transports_[kTransports];
};

std::unique_ptr<Communicator> LoopbackWorld::MakeForTensors(Transport& transport,
                                                            const std::vector<int>& members,
                                                            int lane) const {
  auto flat = Make(transport, members, lane, 0);
  if (!job_->options.hierarchical) return flat;
  const Topology set = topology_.Restrict(members);
  std::vector<int> intra, inter;
  int parts = set.size;  // the smallest local size
  for (int node = 0; node < set.nodes(); ++node) {
    const std::vector<int> ranks = set.RanksOfNode(node);
    const int local_size = static_cast<int>(ranks.size());
    parts = std::min(parts, local_size);
    if (set.local_rank < local_size) inter.push_back(members[ranks[set.local_rank]]);
    if (node != set.node_of[set.rank]) continue;
    for (const int r : ranks) intra.push_back(members[r]);
  }
  auto intra_communicator = Make(transport, intra, lane, 1);
  auto inter_communicator =
      set.local_rank < parts ? Make(transport, inter, lane, 2) : std::unique_ptr<Communicator>();
  return MakeHierarchical(set, std::move(intra_communicator), std::move(inter_communicator),
                          std::move(flat), job_->options.hierarchical_options);
}

}  // namespace

std::vector<std::unique_ptr<World>> MakeLoopbackWorlds(int size, LoopbackOptions options) {
  std::vector<int> node_of = options.node_of;
  if (node_of.empty()) {
    const int nodes = std::clamp(options.virtual_nodes, 1, size);
    for (int r = 0; r < size; ++r) {
      node_of.push_back(static_cast<int>(static_cast<int64_t>(r) * nodes / size));
    }
  }
  auto bootstraps = MakeLoopbackBootstraps(size, options.timeout);
  const auto job = std::make_shared<Job>(size, std::move(options));
  std::vector<std::unique_ptr<World>> worlds;
  for (int r = 0; r < size; ++r) {
    worlds.push_back(
        std::make_unique<LoopbackWorld>(job, Topology::Make(r, node_of), std::move(bootstraps[r])));
  }
  return worlds;
}

void KillLoopbackRank(World& world, int rank) { dynamic_cast<LoopbackWorld&>(world).Kill(rank); }

}  // namespace gradred::comm
