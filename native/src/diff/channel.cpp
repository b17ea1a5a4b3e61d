#include "diff/channel.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/graveyard.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/host_segment.h"

namespace gradred::diff {
namespace {

// Of the transport of differentiable communication, a context has the channels of two process sets:
// the first's for collectives, one of the second's for messages.
int CollectivesOf(int id) { return 2 * id; }
comm::Tag MessagesOf(int id) {
  return {static_cast<uint16_t>((2 * id + 1) * comm::kChannelsPerSet), 0};
}

constexpr int kMostContexts = comm::kChannels / comm::kChannelsPerSet / 2 - 1;

constexpr Nanos kLook = 250 * kMillisecond;  // how often limits are looked at

std::string Seconds(Nanos duration) { return std::to_string(duration / kSecond) + " s"; }

}  // namespace

Channel::Channel(comm::World& world, std::shared_ptr<Traffic> traffic, int id, std::string name,
                 std::vector<int> members, const Limits& limits)
    : world_(world),
      traffic_(std::move(traffic)),
      id_(id),
      name_(std::move(name)),
      members_(std::move(members)),
      limits_(limits) {
  const auto mine = std::find(members_.begin(), members_.end(), world.topology().rank);
  if (mine == members_.end())
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(world.topology().rank) +
                                            " is not in context '" + name_ + "'");
  rank_ = static_cast<int>(mine - members_.begin());
  sent_.assign(members_.size(), 0);
  received_.assign(members_.size(), 0);
  if (id < 0 || id >= kMostContexts)
    throw Error(Kind::kUnsupported, "context '" + name_ + "': no more than " +
                                        std::to_string(kMostContexts) + " contexts in a job");
  traffic_->Locked([&] { communicator_ = world.MakeDiff(members_, CollectivesOf(id)); });
}

Channel::~Channel() {
  if (pending_) Bury(communicator_);
  traffic_->Locked([&] {
    messages_.clear();
    communicator_.reset();
  });
}

void Channel::Begin(std::string what, int64_t place) {
  what_ = std::move(what);
  place_ = place;
}

bool Channel::End() {
  // An operation that throws between its messages leaves them under way.
  pending_ = pending_ || !messages_.empty();
  if (pending_) {
    for (comm::SegmentPtr& segment : scratch_) Bury(segment);
  }
  scratch_.clear();
  return pending_;
}

void* Channel::Scratch(int64_t nbytes) {
  scratch_.push_back(comm::MakeHostSegment(std::max<int64_t>(nbytes, 1)));
  return scratch_.back()->data();
}

double Channel::average_residual() const { return communicator_->average_residual(); }

const std::string& Channel::MpiCommunicator() {
  if (!mpi_communicator_.has_value()) mpi_communicator_ = world_.MakeMpiCommunicator(members_);
  return *mpi_communicator_;
}

void Channel::AllReduce(comm::LayoutPtr layout, comm::CargoPtr cargo) {
  Finish([&] { return communicator_->AllReduceCargo(std::move(layout), std::move(cargo)); });
}

void Channel::AllGather(const void* mine, void* all, std::vector<int64_t> nbytes) {
  Finish([&] { return communicator_->AllGatherV(mine, all, std::move(nbytes)); });
}

void Channel::Broadcast(void* data, int64_t nbytes, int root) {
  Finish([&] { return communicator_->Broadcast(data, nbytes, root); });
}

void Channel::AllToAll(const void* in, std::vector<int64_t> send, void* out,
                       std::vector<int64_t> recv) {
  Finish([&] { return communicator_->AllToAllV(in, std::move(send), out, std::move(recv)); });
}

void Channel::Barrier() {
  Finish([&] { return communicator_->Barrier(); });
}

void Channel::Union(std::string* blob, comm::MergeFunction merge) {
  Finish([&] { return communicator_->Union(blob, std::move(merge)); });
}

void Channel::Send(int peer, const void* data, int64_t nbytes) {
  Start(peer, true,
        [&](int to, comm::Tag tag) { return traffic_->transport().Send(to, tag, data, nbytes); });
}

void Channel::Recv(int peer, void* data, int64_t nbytes) {
  Start(peer, false, [&](int from, comm::Tag tag) {
    return traffic_->transport().Recv(from, tag, data, nbytes);
  });
}

void Channel::Start(int peer, bool sent,
                    const std::function<comm::WorkPtr(int, comm::Tag)>& start) {
  if (peer < 0) return;
  const int64_t number = ++(sent ? sent_ : received_).at(peer);
  traffic_->Locked(
      [&] { messages_.push_back({start(members_[peer], MessagesOf(id_)), peer, sent, number}); });
}

void Channel::TellLeaving(const Status& cause, int64_t finished) {
  // What is under way does not arrive any more, nor does what comes behind it.
  traffic_->Locked([&] {
    for (const Message& message : messages_) {
      if (message.work->Poll() && message.work->status().ok()) continue;
      int64_t& whole = (message.sent ? sent_ : received_)[message.peer];
      whole = std::min(whole, message.number - 1);
    }
  });
  for (int r = 0; r < size(); ++r)
    traffic_->TellLeaving(id_, {cause, finished, sent_[r], received_[r]}, members_[r]);
}

void Channel::WaitForMessages() {
  Status failure;
  Await([&] {
    bool all = true;
    for (const Message& message : messages_) {
      if (!message.work->Poll()) {
        all = false;
      } else if (!message.work->status().ok()) {
        failure = message.work->status();
        return true;
      }
    }
    if (all) messages_.clear();
    return all;
  });
  if (failure.ok()) return;
  pending_ = true;
  throw Error(failure.kind(), what_ + ": " + failure.message());
}

void Channel::Finish(const std::function<comm::WorkPtr()>& start) {
  comm::WorkPtr work = traffic_->Locked(start);
  Status status;
  try {
    Await([&] { return work->Poll(); });
    status = work->status();
  } catch (...) {
    pending_ = true;
    traffic_->Locked([&] { work.reset(); });
    throw;
  }
  traffic_->Locked([&] { work.reset(); });
  if (status.ok()) return;
  pending_ = true;
  throw Error(status.kind(), what_ + ": " + status.message());
}

void Channel::Await(const std::function<bool()>& finished) {
  const Nanos start = Now();
  Nanos moved_at = start, warned = start;
  int64_t moved = traffic_->moved_nbytes();
  bool done = false;
  int asked = -1;  // who was told that this rank waits while nothing moves; -1: nobody
  Status told;
  const auto look = [&] {
    done = finished();
    if (!done) told = CauseOfEnd(traffic_->ToldOf(id_));
    return done || !told.ok();
  };
  const auto ask = [&](int rank) {
    if (rank == asked) return;
    if (asked >= 0) traffic_->TellWaiting(id_, "", asked);
    if (rank >= 0) traffic_->TellWaiting(id_, what_, rank);
    asked = rank;
  };
  while (!traffic_->WaitUntil(look, Now() + kLook)) {
    const Nanos now = Now();
    if (const int64_t n = traffic_->moved_nbytes(); n != moved) {
      moved = n;
      moved_at = now;
    }
    ask(now - moved_at > limits_.transport_timeout ? FirstPresent() : -1);
    if (asked == members_[rank_]) {
      if (const std::string who = AllWaiting(); !who.empty())
        TimeOut("context '" + name_ + "': all ranks wait, and nothing moves any more: " + who);
    }
    if (limits_.stall_fail > 0 && now - start > limits_.stall_fail)
      TimeOut(Who() + ": " + what_ + " is not done after " + Seconds(now - start) +
              ": the other ranks have not come to it");
    if (limits_.stall_warn > 0 && now - warned > limits_.stall_warn) {
      Log(LogLevel::kWarning, Who() + " has waited for " + Seconds(now - start) + " in " + what_);
      warned = now;
    }
  }
  if (done) return ask(-1);
  pending_ = true;
  throw Error(told);
}

// Why what this rank waits for cannot come any more; ok: it can.
Status Channel::CauseOfEnd(const News& news) const {
  if (!news.failure.ok()) return news.failure;
  for (const auto& [rank, leaving] : news.left) {
    if (place_ >= 0 && leaving.finished <= place_) return leaving.cause;
    for (const Message& message : messages_) {
      // What is here already may be unfinished for who sent it.
      if (message.work && message.work->Poll() && message.work->status().ok()) continue;
      if (members_[message.peer] == rank &&
          message.number > (message.sent ? leaving.received : leaving.sent))
        return leaving.cause;
    }
  }
  return Status();
}

// The lowest rank that has not left: it finds out whether all wait, so that of many ranks not each
// tells each.
int Channel::FirstPresent() {
  return traffic_->Locked([&] {
    const News& news = traffic_->ToldOf(id_);
    return *std::find_if(members_.begin(), members_.end(), [&](int member) {
      return member == members_[rank_] || news.left.count(member) == 0;
    });
  });
}

// In what each rank waits that has not left; empty: not all of them do, as far as they have told.
std::string Channel::AllWaiting() {
  std::map<std::string, std::vector<int>> ranks;
  const bool all = traffic_->Locked([&] {
    const News& news = traffic_->ToldOf(id_);
    return std::all_of(members_.begin(), members_.end(), [&](int member) {
      const auto waits = news.waiting.find(member);
      if (member == members_[rank_])
        ranks[what_].push_back(member);
      else if (waits != news.waiting.end())
        ranks[waits->second].push_back(member);
      else
        return news.left.count(member) > 0;
      return true;
    });
  });
  std::string text;
  for (const auto& [what, who] : ranks)
    text += (text.empty() ? "" : "; ") + RanksText(who) + ": " + what;
  return all ? text : "";
}

void Channel::TimeOut(const std::string& text) {
  pending_ = true;
  throw Error(Kind::kTimeout, text);
}

std::string Channel::Who() const {
  return "rank " + std::to_string(members_[rank_]) + " in context '" + name_ + "'";
}

}  // namespace gradred::diff
