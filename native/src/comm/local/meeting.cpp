#include "comm/local/meeting.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/digest.h"
#include "base/status.h"
#include "base/text.h"
#include "comm/local/socket.h"

namespace gradred::comm::local {
namespace {

constexpr uint32_t kHello = 0x67726431;  // "grd1"

constexpr Nanos kStep = 5 * kMillisecond;
constexpr Nanos kLook = 50 * kMillisecond;  // how often to ask for ranks that will not come
constexpr Nanos kNoteDelay = 500 * kMillisecond;

void Sleep(Nanos time) {
  const timespec pause{0, static_cast<long>(time)};
  nanosleep(&pause, nullptr);
}

std::string SocketName(const std::string& job) {
  const Digest digest = DigestOf(job, geteuid());
  char text[64];
  std::snprintf(text, sizeof text, "gradred-%u-%016llx%016llx", geteuid(),
                static_cast<unsigned long long>(digest.hi),
                static_cast<unsigned long long>(digest.lo));
  return text;
}

// What rank 0 sends: a status, and the bytes of all when it is ok.
std::string Reply(const Status& status, const std::string& bytes) {
  Writer writer;
  writer.Put(status.kind());
  writer.PutString(status.message());
  writer.PutString(bytes);
  return writer.Take();
}

std::string OpenReply(const std::string& reply) {
  Reader reader(reply);
  const Kind kind = reader.Get<Kind>();
  const std::string message = reader.GetString();
  if (kind != Kind::kOk) throw Error(kind, message);
  return reader.GetString();
}

class Alone final : public Bootstrap {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> AllGather(const std::string& mine) override { return {mine}; }
};

class Host final : public Bootstrap {
 public:
  Host(const std::string& job, int size, Nanos deadline, OpeningCheck check)
      : deadline_(deadline),
        check_(std::move(check)),
        guests_(static_cast<size_t>(size)),
        pids_(static_cast<size_t>(size)) {
    // Closed when all have come, so that a later opening of the same ranks cannot reach this one.
    Socket listener = Socket::Listen(SocketName(job), size);
    while (true) {
      const std::vector<int> missing = Missing();
      if (missing.empty()) break;
      if (Now() >= deadline_) {
        Fail({Kind::kTimeout, "job '" + job + "': " + RanksText(missing) + " of " +
                                  std::to_string(size) +
                                  " did not come within the time to open; look at the output of "
                                  "those ranks"});
      }
      WaitForGuest(listener);
      if (const std::optional<Status> failure = check_()) Fail(*failure);
    }
    Answer("");
  }

  int rank() const override { return 0; }
  int size() const override { return static_cast<int>(guests_.size()); }

  std::vector<std::string> AllGather(const std::string& mine) override {
    std::vector<std::string> all(guests_.size());
    all[0] = mine;
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      bool open = false;
      try {
        open = guests_[rank].Receive(&all[rank], deadline_);
      } catch (const Error& e) {
        Fail({e.kind(), "rank " + std::to_string(rank) + " (pid " + std::to_string(pids_[rank]) +
                            "): " + e.what()});
      }
      if (!open) FailLost(static_cast<int>(rank));
    }
    Writer writer;
    for (const std::string& bytes : all) writer.PutString(bytes);
    Answer(writer.Take());
    return all;
  }

 private:
  std::vector<int> Missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < size(); ++rank) {
      if (!guests_[static_cast<size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

  void WaitForGuest(Socket& listener) {
    std::vector<pollfd> entries{{listener.fd(), POLLIN, 0}};
    for (const Socket& guest : guests_) {
      if (guest) entries.push_back({guest.fd(), POLLIN, 0});
    }
    const Nanos left = std::max<Nanos>(deadline_ - Now(), 0);
    poll(entries.data(), entries.size(),
         static_cast<int>(std::min(left, kLook) / kMillisecond + 1));
    for (int rank = 1; rank < size(); ++rank) {  // a guest says nothing before it is answered
      const Socket& guest = guests_[static_cast<size_t>(rank)];
      if (guest && guest.Closed()) FailLost(rank);
    }
    if ((entries[0].revents & POLLIN) == 0) return;
    Socket guest = listener.Accept();
    if (!guest || !guest.PeerIsSameUser()) return;
    Welcome(std::move(guest));
  }

  void Welcome(Socket guest) {
    // A stranger that says nothing, or something else, must not hold the others up.
    const Nanos limit = std::min(deadline_, Now() + 5 * kSecond);
    int rank = 0, size_there = 0, pid = 0;
    try {
      std::string bytes;
      if (!guest.Receive(&bytes, limit)) return;
      Reader reader(bytes);
      if (reader.Get<uint32_t>() != kHello) return;
      rank = reader.Get<int>();
      size_there = reader.Get<int>();
      pid = reader.Get<int>();
    } catch (const Error&) {
      return;
    }
    const std::string who = "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
    Status status;
    if (size_there != size()) {
      status = {Kind::kMismatch, who + " was started for " + std::to_string(size_there) +
                                     " ranks (GRADRED_LOCAL_SIZE), rank 0 for " +
                                     std::to_string(size())};
    } else if (rank < 1 || rank >= size()) {
      status = {Kind::kInvalidArgument,
                who + ": expected a rank in 1 ... " + std::to_string(size() - 1)};
    } else if (guests_[static_cast<size_t>(rank)]) {
      status = {Kind::kInvalidArgument, who + " and the process " +
                                            std::to_string(pids_[static_cast<size_t>(rank)]) +
                                            " are both started as rank " + std::to_string(rank)};
    } else {
      guests_[static_cast<size_t>(rank)] = std::move(guest);
      pids_[static_cast<size_t>(rank)] = pid;
      return;
    }
    guest.Send(Reply(status, ""), limit);
    Fail(status);
  }

  void Answer(const std::string& bytes) {
    const std::string reply = Reply({}, bytes);
    for (size_t rank = 1; rank < guests_.size(); ++rank) {
      if (!guests_[rank].Send(reply, deadline_)) FailLost(static_cast<int>(rank));
    }
  }

  [[noreturn]] void FailLost(int rank) {
    // Its note says more, and may come a little later than the end of the connection.
    for (const Nanos until = Now() + kNoteDelay; Now() < until; Sleep(kStep))
      if (const std::optional<Status> failure = check_()) Fail(*failure);
    Fail({Kind::kPeerLost, "rank " + std::to_string(rank) + " (pid " +
                               std::to_string(pids_[static_cast<size_t>(rank)]) +
                               ") ended while the job was opening"});
  }

  [[noreturn]] void Fail(const Status& status) {
    const std::string reply = Reply(status, "");
    for (Socket& guest : guests_) {
      if (!guest) continue;
      try {
        guest.Send(reply, Now() + kSecond);
      } catch (const Error&) {
        // It sees the end of the connection.
      }
    }
    throw Error(status);
  }

  Nanos deadline_;
  const OpeningCheck check_;
  std::vector<Socket> guests_;  // by rank; [0] is empty
  std::vector<int> pids_;
};

class Guest final : public Bootstrap {
 public:
  Guest(const std::string& job, int rank, int size, Nanos deadline, const OpeningCheck& check)
      : rank_(rank), size_(size), deadline_(deadline) {
    const std::string name = SocketName(job);
    Nanos looked = Now();
    while (true) {
      host_ = Socket::TryConnect(name);
      if (host_) break;
      if (Now() - looked > kLook) {
        if (const std::optional<Status> failure = check()) throw Error(*failure);
        looked = Now();
      }
      if (Now() >= deadline_) {
        throw Error(Kind::kTimeout, "job '" + job + "': rank 0 of " + std::to_string(size) +
                                        " did not come within the time to open, says rank " +
                                        std::to_string(rank));
      }
      Sleep(kStep);
    }
    if (!host_.PeerIsSameUser()) {
      throw Error(Kind::kTransportError, "rank " + std::to_string(rank) +
                                             ": a process of another user listens at @" + name);
    }
    Writer writer;
    writer.Put(kHello);
    writer.Put(rank_);
    writer.Put(size_);
    writer.Put(static_cast<int>(getpid()));
    Tell(writer.Take());
    Hear();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::vector<std::string> AllGather(const std::string& mine) override {
    Tell(mine);
    const std::string bytes = Hear();
    Reader reader(bytes);
    std::vector<std::string> all(static_cast<size_t>(size_));
    for (std::string& one : all) one = reader.GetString();
    return all;
  }

 private:
  // Whether it could be sent or not: the reason waits in what rank 0 has sent.
  void Tell(const std::string& bytes) { (void)host_.Send(bytes, deadline_); }

  std::string Hear() {
    std::string reply;
    // Rank 0 knows better which rank is missing; it reports that at the deadline.
    if (!host_.Receive(&reply, deadline_ + 2 * kSecond)) {
      throw Error(Kind::kPeerLost,
                  "rank 0 ended while the job was opening, says rank " + std::to_string(rank_));
    }
    return OpenReply(reply);
  }

  int rank_, size_;
  Nanos deadline_;
  Socket host_;
};

}  // namespace

std::unique_ptr<Bootstrap> Meet(const std::string& job, int rank, int size, Nanos deadline,
                                const OpeningCheck& check) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(Kind::kInvalidArgument,
                "GRADRED_LOCAL_RANK: expected a rank below GRADRED_LOCAL_SIZE, got " +
                    std::to_string(rank) + " of " + std::to_string(size));
  }
  if (size == 1) return std::make_unique<Alone>();
  if (rank == 0) return std::make_unique<Host>(job, size, deadline, check);
  return std::make_unique<Guest>(job, rank, size, deadline, check);
}

}  // namespace gradred::comm::local
