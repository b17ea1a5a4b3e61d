#include "comm/world.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>

#include "comm/algorithm_communicator.h"
#include "comm/fabric.h"
#include "comm/hierarchical.h"
#include "comm/job_notes.h"
#include "comm/node_first.h"
#include "comm/peers.h"
#include "comm/roster.h"
#include "comm/routed.h"
#include "comm/shm/communicator.h"
#include "comm/shm/open_page.h"
#include "comm/shm/transport.h"
#include "comm/watched.h"

namespace gradred::comm {
namespace {

// Of a set's four channels, the same on control(), data() and diff(), which are apart from each
// other; intra has two.
constexpr int kIntraChannel = 0, kInterChannel = 2, kFlatChannel = 3;
constexpr uint16_t kCloseChannel = kChannels - 1;  // of control()
constexpr int64_t kNodeChunks = 4;                 // chunks of messages in one of hierarchical

const Traffic kTraffic[shm::kTransports] = {Traffic::kControl, Traffic::kData, Traffic::kSide,
                                            Traffic::kDiff};

uint16_t ChannelOf(int lane, int channel) {
  constexpr int kSets = kChannels / kChannelsPerSet - 1;  // the last one's are kept for closing
  if (lane < 0 || lane >= kSets) {
    throw Error(Kind::kInvalidArgument, "process set " + std::to_string(lane) + ": at most " +
                                            std::to_string(kSets) + " process sets are possible");
  }
  return static_cast<uint16_t>(lane * kChannelsPerSet + channel);
}

// A process set by nodes.
struct SetNodes {
  SetNodes(const Topology& world, const std::vector<int>& members)
      : topology(world.Restrict(members)), smallest(members.size()) {
    for (int node = 0; node < topology.nodes(); ++node) {
      nodes.emplace_back();
      for (const int r : topology.RanksOfNode(node)) {
        nodes.back().push_back(members[static_cast<size_t>(r)]);
      }
      largest = std::max(largest, nodes.back().size());
      smallest = std::min(smallest, nodes.back().size());
    }
  }
  const std::vector<int>& mine() const {
    return nodes[static_cast<size_t>(topology.node_of[static_cast<size_t>(topology.rank)])];
  }
  // The ranks with this local rank, one a node.
  std::vector<int> Across(size_t local_rank) const {
    std::vector<int> across;
    for (const std::vector<int>& node : nodes) across.push_back(node[local_rank]);
    return across;
  }
  const Topology topology;
  std::vector<std::vector<int>> nodes;  // world ranks
  size_t largest = 0, smallest;         // sizes of nodes
};

class WorldImpl final : public World {
 public:
  WorldImpl(std::unique_ptr<Fabric> fabric, const WorldOptions& options);
  ~WorldImpl() override;

  const Topology& topology() const override { return topology_; }
  uint64_t nonce() const override { return roster_.nonce; }
  std::string Describe() const override;
  Transport& control() override { return *transports_[0]; }
  Transport& data() override { return *transports_[1]; }
  Transport& side() override { return *transports_[2]; }
  Transport& diff() override { return *transports_[3]; }
  std::unique_ptr<Communicator> MakeControl(const std::vector<int>& members, int lane) override;
  std::unique_ptr<Communicator> MakeData(const std::vector<int>& members, int lane) override {
    return MakeForTensors(data(), members, lane);
  }
  std::unique_ptr<Communicator> MakeDiff(const std::vector<int>& members, int context) override {
    return MakeForTensors(diff(), members, context);
  }
  std::string MakeMpiCommunicator(const std::vector<int>& members) override {
    return fabric_->MakeMpiCommunicator(members);
  }
  std::optional<LostPeers> CheckPeers() override;
  int64_t network_nbytes() const override {
    return transports_[1]->far_sent_nbytes() + transports_[3]->far_sent_nbytes();
  }
  void Wait(Work& work, Nanos timeout, const std::string& what) override;
  void Close() override;
  void Abort(const Status& cause) override;

 private:
  enum class State { kOpen, kClosed, kAborted };

  void OpenTransports();
  void OpenNative();
  void WatchPeers();
  bool Forked() const { return getpid() != pid_; }
  int PageIndexOf(int rank) const;
  std::unique_ptr<Communicator> MakeFlat(Transport& transport, std::vector<int> members, int lane,
                                         int channel) const;
  std::unique_ptr<Communicator> MakeIntra(Transport& transport, const SetNodes& set,
                                          int lane) const;
  std::unique_ptr<Communicator> MakeForTensors(Transport& transport,
                                               const std::vector<int>& members, int lane) const;

  const pid_t pid_ = getpid();
  WorldOptions options_;
  const std::vector<AlgorithmRow> rows_;  // that replace default ones
  State state_ = State::kOpen;
  std::unique_ptr<Fabric> fabric_;
  Roster roster_;
  Topology topology_;
  std::vector<int> machine_ranks_;
  std::shared_ptr<shm::Page> page_;
  std::unique_ptr<RoutedTransport> transports_[shm::kTransports];
  NativeReducePtr native_;           // of the world's tensors; null: none
  std::vector<int> native_members_;  // its ranks
  std::unique_ptr<Peers> peers_;
};

WorldImpl::WorldImpl(std::unique_ptr<Fabric> fabric, const WorldOptions& options)
    : options_(options),
      rows_(ParseAlgorithms(options.algorithms, options.reproducible)),
      fabric_(std::move(fabric)) {
  Bootstrap& bootstrap = fabric_->bootstrap();
  roster_ = MakeRoster(bootstrap, options_);
  topology_ = Topology::Make(bootstrap.rank(), roster_.node_of);
  machine_ranks_ = roster_.MachineRanks(topology_.rank);
  page_ = shm::OpenPage(bootstrap, roster_.machine_of, roster_.nonce);
  try {
    OpenTransports();
    OpenNative();
    WatchPeers();
  } catch (...) {  // the others have met this rank and look at its page from now on
    page_->Leave(PageIndexOf(topology_.rank), shm::MemberState::kFailed,
                 CurrentException().message());
    throw;
  }
}

void WorldImpl::WatchPeers() {
  std::vector<Peer> peers;
  for (const int rank : machine_ranks_) {
    if (rank != topology_.rank) peers.push_back(roster_.ranks[static_cast<size_t>(rank)]);
  }
  const auto farewell = [this](int rank) {
    const shm::Member& member = page_->member(PageIndexOf(rank));
    const auto state = static_cast<shm::MemberState>(member.state.load(std::memory_order_acquire));
    Farewell result;
    result.closed = state == shm::MemberState::kClosed;
    if (state == shm::MemberState::kFailed) result.cause = member.cause;
    return result;
  };
  peers_ = std::make_unique<Peers>(std::move(peers), farewell, JobNotes::OfJob());
}

// Shared memory to the ranks of my node. To those of other virtual nodes the fabric's messages, as
// between machines, so that virtual nodes try the real thing; where the fabric has none, shared
// memory again.
void WorldImpl::OpenTransports() {
  const bool one_node = topology_.nodes() == 1;
  for (int i = 0; i < shm::kTransports; ++i) {
    std::unique_ptr<Transport> far = one_node ? nullptr : fabric_->MakeTransport(kTraffic[i]);
    if (far == nullptr && roster_.machines() > 1) {
      throw Error(Kind::kUnsupported,
                  "the ranks run on " + std::to_string(roster_.machines()) +
                      " machines, or in containers that do not share processes, and transport '" +
                      options_.transport + "' joins one machine only; use MPI");
    }
    std::vector<int> near_of(static_cast<size_t>(topology_.size), -1);
    for (const int rank : machine_ranks_) {
      const bool same_node = roster_.node_of[static_cast<size_t>(rank)] ==
                             roster_.node_of[static_cast<size_t>(topology_.rank)];
      if (same_node || far == nullptr) near_of[static_cast<size_t>(rank)] = PageIndexOf(rank);
    }
    transports_[i] = std::make_unique<RoutedTransport>(
        topology_.rank, std::move(near_of),
        shm::MakeTransport(page_, i, PageIndexOf(topology_.rank)), std::move(far));
  }
}

// Collectives of the outside library need a communicator of theirs, which is made here and nowhere
// else: the world's tensors have them where a row asks for them, other process sets never.
void WorldImpl::OpenNative() {
  const bool asked = std::any_of(rows_.begin(), rows_.end(), [](const AlgorithmRow& row) {
    return row.algorithm == Algorithm::kNative;
  });
  if (!asked) return;
  std::vector<int> all(static_cast<size_t>(topology_.size));
  std::iota(all.begin(), all.end(), 0);
  const SetNodes set(topology_, all);
  const auto local_rank = static_cast<size_t>(topology_.local_rank);
  if (set.largest == 1 || options_.intra == "flat")
    native_members_ = all;
  else if (local_rank < set.smallest)
    native_members_ = set.Across(local_rank);
  if (!native_members_.empty()) native_ = data().MakeNative(native_members_);
}

int WorldImpl::PageIndexOf(int rank) const {
  return static_cast<int>(std::lower_bound(machine_ranks_.begin(), machine_ranks_.end(), rank) -
                          machine_ranks_.begin());
}

WorldImpl::~WorldImpl() {
  if (Forked()) {  // everything here belongs to the parent
    (void)peers_.release();
    for (auto& transport : transports_) (void)transport.release();
    (void)fabric_.release();
    return;
  }
  if (state_ == State::kOpen && fabric_ != nullptr && page_ != nullptr) {
    Abort({Kind::kAbandoned,
           "rank " + std::to_string(topology_.rank) + " left without closing the job"});
  }
}

std::string WorldImpl::Describe() const {
  std::string text = fabric_->Describe();
  if (topology_.size == 1) return text;
  text += options_.intra == "shm" ? ", reductions in shared memory" : ", reductions by messages";
  text += " in the node";
  const int nodes = topology_.nodes(), machines = roster_.machines();
  if (nodes != machines) {
    text += ", " + std::to_string(nodes) + " virtual nodes on " + std::to_string(machines) +
            (machines == 1 ? " machine" : " machines");
  }
  return text;
}

std::unique_ptr<Communicator> WorldImpl::MakeFlat(Transport& transport, std::vector<int> members,
                                                  int lane, int channel) const {
  AlgorithmOptions options;
  options.rows = rows_;
  if (&transport == transports_[1].get() && lane == 0 && members == native_members_)
    options.native = native_;
  options.chunk_nbytes = options_.chunk_nbytes;
  return MakeAlgorithmCommunicator(transport, std::move(members), ChannelOf(lane, channel),
                                   options);
}

std::unique_ptr<Communicator> WorldImpl::MakeIntra(Transport& transport, const SetNodes& set,
                                                   int lane) const {
  shm::ShmOptions options;
  options.nonce = roster_.nonce;
  options.naming = page_->naming();
  options.scale_size = static_cast<int>(set.largest);
  return shm::MakeCommunicator(transport, set.mine(), ChannelOf(lane, kIntraChannel), options);
}

std::unique_ptr<Communicator> WorldImpl::MakeControl(const std::vector<int>& members, int lane) {
  const SetNodes set(topology_, members);
  if (set.largest == 1 || options_.intra == "flat")
    return MakeFlat(control(), members, lane, kFlatChannel);
  auto intra = MakeIntra(control(), set, lane);
  if (set.nodes.size() == 1) return intra;
  std::unique_ptr<Communicator> leaders;
  if (set.topology.local_rank == 0)
    leaders = MakeFlat(control(), set.Across(0), lane, kInterChannel);
  return MakeNodeFirst(std::move(intra), std::move(leaders),
                       MakeFlat(control(), members, lane, kFlatChannel));
}

std::unique_ptr<Communicator> WorldImpl::MakeForTensors(Transport& transport,
                                                        const std::vector<int>& members,
                                                        int lane) const {
  const SetNodes set(topology_, members);
  if (set.largest == 1 || options_.intra == "flat")
    return MakeFlat(transport, members, lane, kFlatChannel);
  auto intra = MakeIntra(transport, set, lane);
  if (set.nodes.size() == 1) return intra;
  std::unique_ptr<Communicator> inter;
  const auto local_rank = static_cast<size_t>(set.topology.local_rank);
  if (local_rank < set.smallest)
    inter = MakeFlat(transport, set.Across(local_rank), lane, kInterChannel);
  HierarchicalOptions options;
  // A chunk is cut into parts for the ranks of a node, and these into messages for the other nodes:
  // larger ones make up for that (16 MB on virtual nodes over TCP:
  // benchmarks/results/hierarchical.json).
  options.chunk_nbytes = options.cargo_chunk_nbytes = kNodeChunks * options_.chunk_nbytes;
  return MakeHierarchical(set.topology, std::move(intra), std::move(inter),
                          MakeFlat(transport, members, lane, kFlatChannel), options);
}

std::optional<LostPeers> WorldImpl::CheckPeers() {
  if (state_ != State::kOpen || Forked()) return std::nullopt;
  return peers_->Check();
}

void WorldImpl::Wait(Work& work, Nanos timeout, const std::string& what) {
  constexpr Nanos kLook = 100 * kMillisecond;
  const Nanos start = Now();
  while (true) {
    const Status status = comm::Wait(work, control(), kLook, what);
    if (status.ok()) return;
    if (work.Poll()) return ThrowIfError(work.status());  // maybe since the time has passed
    if (const std::optional<LostPeers> lost = CheckPeers()) throw Error(lost->status);
    if (Now() - start > timeout)
      throw Error(Kind::kTimeout, "rank " + std::to_string(topology_.rank) + ": " + what +
                                      " did not finish within " +
                                      std::to_string(timeout / kSecond) + " s");
  }
}

void WorldImpl::Close() {
  if (state_ != State::kOpen || Forked()) return;
  std::vector<int> all(static_cast<size_t>(topology_.size));
  std::iota(all.begin(), all.end(), 0);
  auto everybody = MakeAlgorithmCommunicator(control(), all, kCloseChannel);
  const WorkPtr barrier = everybody->Barrier();
  Wait(*barrier, options_.timeout, "closing the job");
  page_->Leave(PageIndexOf(topology_.rank), shm::MemberState::kClosed, "");
  state_ = State::kClosed;
  native_.reset();
  // The bells stay: whoever used the transports may ring while it is taken down.
  for (auto& transport : transports_) transport->DropFar();
  fabric_->Close();
}

void WorldImpl::Abort(const Status& cause) {
  if (state_ != State::kOpen || Forked()) return;  // the first cause stays
  state_ = State::kAborted;
  page_->Leave(PageIndexOf(topology_.rank), shm::MemberState::kFailed, cause.message());
  for (auto& transport : transports_) {
    if (transport != nullptr) transport->Abort(cause);
  }
  fabric_->Abort();
}

void CheckWord(const char* name, const std::string& value,
               const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  std::string text;
  for (const std::string& word : allowed) text += (text.empty() ? "" : ", ") + word;
  throw Error(Kind::kInvalidArgument,
              std::string(name) + ": expected one of " + text + ", got '" + value + "'");
}

std::string ChooseTransport(const WorldOptions& options) {
  if (options.transport == "self") {
    const LauncherInfo launcher = FindLauncher();
    const int size = std::max(launcher.size, LocalLauncherSize());
    if (size > 1)
      throw Error(Kind::kInvalidArgument, "GRADRED_TRANSPORT=self is a job of one rank, but " +
                                              std::to_string(size) +
                                              " were started: unset it, or start one");
  }
  CheckWord("transport", options.transport, {"auto", "mpi", "local", "self"});
  if (options.transport != "auto") return options.transport;
  if (options.mpi_comm != nullptr) return "mpi";
  const LauncherInfo launcher = FindLauncher();
  if (const int local_size = LocalLauncherSize(); local_size > 0) {
    // An MPI that the program has initialised by itself knows of one rank.
    const int mpi_size = InitializedMpiSize(), size = std::max(mpi_size, launcher.size);
    if (size <= 1) return "local";
    if (size == local_size) return "mpi";
    throw Error(Kind::kInvalidArgument,
                "GRADRED_LOCAL_SIZE says that " + std::to_string(local_size) +
                    " ranks were started without MPI, but " +
                    (mpi_size >= launcher.size ? "MPI has " : launcher.name + " started ") +
                    std::to_string(size) +
                    ": set GRADRED_TRANSPORT to local or mpi, or unset GRADRED_LOCAL_SIZE");
  }
  const bool size_unsaid = launcher.size == 0 && launcher.rank >= 0;  // some PMIx launchers
  return MpiIsInitialized() || launcher.size > 1 || size_unsaid ? "mpi" : "self";
}

void CheckOptions(const WorldOptions& options) {
  CheckWord("intra", options.intra, {"shm", "flat"});
  ParseAlgorithms(options.algorithms, options.reproducible);
  if (options.virtual_nodes < 1) {
    throw Error(Kind::kInvalidArgument,
                "virtual_nodes: expected at least 1, got " + std::to_string(options.virtual_nodes));
  }
}

// Note [Failures in init]
// What is wrong on one rank must reach the others, which wait for it:
//   1. bad options: the rank meets the others all the same, with defaults in their place, and
//      tells them; all throw the same (`problem`, MakeRoster);
//   2. it cannot meet (no library, a wrong launcher), its program ends or never comes: the notes of
//      the job's folder, which all look at while they wait (OpeningCheck). MPI_Init and MPI's
//      collectives cannot be interrupted: where there are notes they run in a thread that is left
//      behind, and MPI is not called again. Under a plain mpirun, mpirun ends the job;
//   3. it fails or ends after the meeting: its state in the machine's page (Peers).
WorldOptions WithProblems(const WorldOptions& options) {
  WorldOptions chosen = options;
  const auto add = [&chosen] {
    if (!chosen.problem.empty()) chosen.problem += "; ";
    chosen.problem += CurrentException().message();
  };
  try {
    CheckOptions(chosen);
  } catch (...) {
    add();
    const WorldOptions defaults;
    chosen.intra = defaults.intra;
    chosen.virtual_nodes = defaults.virtual_nodes;
    chosen.algorithms = defaults.algorithms;
  }
  try {
    chosen.transport = ChooseTransport(chosen);
  } catch (...) {
    add();
    chosen.transport = "auto";
    try {
      chosen.transport = ChooseTransport(chosen);
    } catch (...) {
      throw Error(Kind::kInvalidArgument, chosen.problem);
    }
  }
  return chosen;
}

// By the launcher's numbers; -1: not said.
int RankOfLauncher() {
  if (const LauncherInfo launcher = FindLauncher(); launcher.rank >= 0) return launcher.rank;
  const char* local = std::getenv("GRADRED_LOCAL_RANK");
  return local == nullptr ? -1 : std::atoi(local);
}

}  // namespace

std::unique_ptr<World> OpenWorld(const WorldOptions& options) {
  static std::atomic<int> openings{0};
  const JobNotes notes = JobNotes::OfJob();
  const int opening = ++openings, rank = RankOfLauncher();
  const OpeningCheck check =
      CheckOf(notes, {rank, options.ranks, options.mpi_comm != nullptr}, opening);
  std::string problem;
  try {
    const WorldOptions chosen = WithProblems(options);
    problem = chosen.problem;
    if (chosen.transport != "mpi")
      return std::make_unique<WorldImpl>(OpenLocalFabric(chosen, check), chosen);
    const auto open = [chosen]() -> std::unique_ptr<World> {
      return std::make_unique<WorldImpl>(OpenMpiFabric(chosen), chosen);
    };
    if (!notes.exist() || FindLauncher().size <= 1) return open();
    return RunWatched<std::unique_ptr<World>>(open, check, options.timeout, LeaveMpi,
                                              "rank " + std::to_string(rank) + ": opening MPI");
  } catch (...) {
    Status failure = CurrentException();
    if (failure.message().find(problem) == std::string::npos)  // there was no meeting to say it
      failure = Status(Kind::kInvalidArgument, problem);
    // The first failure is the cause; what follows from it is not told again.
    if (!check()) notes.TellFailure(rank, opening, failure);
    throw Error(failure);
  }
}

}  // namespace gradred::comm
