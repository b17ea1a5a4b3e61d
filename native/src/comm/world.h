// Everything a rank needs to talk to the others, however it was launched. The engine sees this
// interface alone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/peers.h"
#include "comm/transport.h"

namespace gradred::comm {

// Channels of a transport: the control communicator of the process set with lane s and its data
// communicators use 4 * s ... 4 * s + 3. Of two sets that exist at a time no two have one lane.
constexpr int kChannelsPerSet = 4;

class World {
 public:
  virtual ~World() = default;
  virtual const Topology& topology() const = 0;
  virtual uint64_t nonce() const = 0;        // of this job, equal on all ranks
  virtual std::string Describe() const = 0;  // "Open MPI 5.0.11 (path), shared memory in the node"

  // Four transports over all ranks with separate traffic, each for one thread at a time.
  virtual Transport& control() = 0;
  virtual Transport& data() = 0;
  virtual Transport& side() = 0;
  virtual Transport& diff() = 0;  // communication as nodes of a graph

  // For a process set (world ranks, ascending, the caller among them). Local calls: no waiting. The
  // first is over control(), the second, for tensors, over data().
  virtual std::unique_ptr<Communicator> MakeControl(const std::vector<int>& members, int lane) = 0;
  virtual std::unique_ptr<Communicator> MakeData(const std::vector<int>& members, int lane) = 0;

  // As MakeData, over diff(); `context` is one of as many numbers, apart from those of sets.
  virtual std::unique_ptr<Communicator> MakeDiff(const std::vector<int>& members, int context) = 0;

  // For another library that works on MPI: a communicator of `members` (ranks, ascending, the
  // caller among them), as the bytes of its handle. It lasts until MPI_Finalize. Empty where the
  // job does not run on MPI; kUnsupported where MPI takes one call at a time. Collective over the
  // members; waits.
  virtual std::string MakeMpiCommunicator(const std::vector<int>& /*members*/) { return {}; }

  // Bytes of tensors' messages that this rank has sent to ranks of other nodes. Any thread.
  virtual int64_t network_nbytes() const = 0;

  // Peers' processes have ended without closing the world: kPeerLost naming rank, host, pid and,
  // where known, the signal (a launcher may leave it in the job's notes). Of this machine's peers;
  // others are for those of their machines to tell. Cheap; called a few times a second by the
  // control thread.
  virtual std::optional<LostPeers> CheckPeers() = 0;

  // Waits for work on control() while nobody else uses it, and looks after the peers meanwhile:
  // throws what becomes of it, or of them, or kTimeout naming `what`.
  virtual void Wait(Work& work, Nanos timeout, const std::string& what) = 0;

  // Collective, at a clean end: no peer's end is a loss from here on. Throws on time out.
  virtual void Close() = 0;
  // After an engine error: aborts the transports; nothing of the outside library is called again,
  // at exit neither.
  virtual void Abort(const Status& cause) = 0;
};

struct WorldOptions {
  std::string transport = "auto";  // auto, mpi, local (one machine, no MPI), self (one rank)
  std::string intra = "shm";       // in a node: shm, or flat (algorithms over messages)
  int virtual_nodes = 1;           // cut each machine into this many nodes of consecutive ranks
  std::string mpi_library;         // path; empty: the loaded one, else one that fits the launcher
  bool mpi_serialized = false;     // asks for MPI_THREAD_SERIALIZED, and makes one call at a time
  std::string prefix;              // sys.prefix: wheels keep their libraries there
  const void* mpi_comm =
      nullptr;  // handle of a communicator of the loaded MPI, mpi_comm_size bytes: the ranks to use
  int mpi_comm_size = 0;
  std::vector<int> ranks;  // of MPI_COMM_WORLD, or of the local launcher's; empty: all
  int64_t chunk_nbytes = 1 << 20;
  std::string algorithms;    // see ParseAlgorithms; empty: the defaults
  bool reproducible = true;  // false: algorithms may add in an order that changes with the sizes
  Nanos timeout = 300 * kSecond;  // for opening
  // What is wrong with this rank's settings, told to all: opening throws it as kInvalidArgument on
  // every rank. Empty: nothing.
  std::string problem;
};

// Collective over the job. auto: local when GRADRED_LOCAL_SIZE is set (see comm/local/), but mpi
// when MPI or its launcher has equally many ranks, and kInvalidArgument when it has others, more
// than one; mpi when an MPI is initialised or a launcher's variables say more than one rank; else
// self.
std::unique_ptr<World> OpenWorld(const WorldOptions& options);

}  // namespace gradred::comm
