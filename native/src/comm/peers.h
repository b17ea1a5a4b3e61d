// Whether the processes of this machine's other ranks are alive.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "comm/job_notes.h"

namespace gradred::comm {

// A process, told apart from a later one with the same pid by its start time (clock ticks after
// boot).
struct ProcessId {
  int pid = 0;
  uint64_t start = 0;
};
ProcessId ThisProcess();
bool IsAlive(const ProcessId& process);  // false for a zombie

struct Peer {
  int rank = 0;
  std::string host;
  ProcessId process;
};

// How a rank has left, by its own words in shared memory.
struct Farewell {
  bool closed = false;  // cleanly: its end is no loss
  std::string cause;    // the engine error that it ended with; empty: none
};

// Peers that are gone: who, and the error that says so.
struct LostPeers {
  Status status;
  std::vector<int> ranks;   // ascending
  std::vector<int> silent;  // of them, those that have not said why
};

// Used by one thread. Asking is cheap: one poll over pidfds, or a look at /proc where the kernel
// has none.
class Peers {
 public:
  // `notes`: where a launcher leaves what ended a rank.
  Peers(std::vector<Peer> peers, std::function<Farewell(int rank)> farewell, JobNotes notes);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // kPeerLost naming every rank that has ended without closing, or has failed and may go on without
  // us. Gives the launcher up to a second to leave its note: until then there is no loss yet.
  std::optional<LostPeers> Check();

 private:
  struct Watched {
    Peer peer;
    int fd;  // pidfd, or -1
    bool ended;
  };
  void FindEnded();

  std::vector<Watched> watched_;
  std::function<Farewell(int rank)> farewell_;
  const JobNotes notes_;
  Nanos first_loss_ = 0;
};

}  // namespace gradred::comm
