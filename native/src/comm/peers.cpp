#include "comm/peers.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

namespace gradred::comm {
namespace {

constexpr Nanos kNoteDelay = kSecond;

int OpenPidFd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// State letter and start time of a process; false when there is none.
bool ReadStat(int pid, char* state, uint64_t* start) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  fields >> *state;  // field 3
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return static_cast<bool>(fields >> *start);
}

}  // namespace

ProcessId ThisProcess() {
  ProcessId me{static_cast<int>(getpid()), 0};
  char state;
  ReadStat(me.pid, &state, &me.start);
  return me;
}

bool IsAlive(const ProcessId& process) {
  if (process.start == 0) return kill(process.pid, 0) == 0 || errno == EPERM;  // no /proc here
  char state;
  uint64_t start = 0;
  return ReadStat(process.pid, &state, &start) && start == process.start && state != 'Z' &&
         state != 'X';
}

Peers::Peers(std::vector<Peer> peers, std::function<Farewell(int rank)> farewell, JobNotes notes)
    : farewell_(std::move(farewell)), notes_(std::move(notes)) {
  for (Peer& peer : peers) {
    const int fd = OpenPidFd(peer.process.pid);
    // After opening: the pid may already belong to another process.
    const bool alive = IsAlive(peer.process);
    watched_.push_back({std::move(peer), fd, !alive});
  }
}

Peers::~Peers() {
  for (const Watched& watched : watched_) {
    if (watched.fd >= 0) close(watched.fd);
  }
}

void Peers::FindEnded() {
  std::vector<pollfd> entries;
  for (const Watched& watched : watched_) {
    entries.push_back({watched.ended ? -1 : watched.fd, POLLIN, 0});
  }
  poll(entries.data(), entries.size(), 0);
  for (size_t i = 0; i < watched_.size(); ++i) {
    Watched& watched = watched_[i];
    if (watched.ended) continue;
    watched.ended = watched.fd >= 0 ? entries[i].revents != 0 : !IsAlive(watched.peer.process);
  }
}

std::optional<LostPeers> Peers::Check() {
  FindEnded();
  LostPeers lost;
  std::string text;
  bool complete = true;
  for (const Watched& watched : watched_) {
    const Peer& peer = watched.peer;
    const Farewell farewell = farewell_(peer.rank);
    if (farewell.closed || (!watched.ended && farewell.cause.empty())) continue;
    lost.ranks.push_back(peer.rank);
    if (!text.empty()) text += "; ";
    text += "rank " + std::to_string(peer.rank) + " on " + peer.host + " (pid " +
            std::to_string(peer.process.pid) + ")";
    if (!farewell.cause.empty()) {
      text += (watched.ended ? " ended after an error: " : " failed: ") + farewell.cause;
      continue;
    }
    lost.silent.push_back(peer.rank);
    const std::string note = notes_.EndOf(peer.rank);
    text += " ended without closing the job" + (note.empty() ? "" : ": " + note);
    complete = complete && (!notes_.exist() || !note.empty());
  }
  if (text.empty()) return std::nullopt;
  if (first_loss_ == 0) first_loss_ = Now();
  if (!complete && Now() - first_loss_ < kNoteDelay) return std::nullopt;
  lost.status = {Kind::kPeerLost, text};
  return lost;
}

}  // namespace gradred::comm
