#include "diff/channel.h"

#include <algorithm>
#include <utility>

#include "base/graveyard.h"
#include "base/log.h"
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

constexpr Nanos kLastMessages = kSecond;
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
  agreed_ = false;
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
  if (peer < 0) return;
  traffic_->Locked([&] {
    messages_.push_back(
        traffic_->transport().Send(members_.at(peer), MessagesOf(id_), data, nbytes));
  });
}

void Channel::Recv(int peer, void* data, int64_t nbytes) {
  if (peer < 0) return;
  traffic_->Locked([&] {
    messages_.push_back(
        traffic_->transport().Recv(members_.at(peer), MessagesOf(id_), data, nbytes));
  });
}

void Channel::WaitForMessages() {
  Status failure;
  Await([&] {
    bool all = true;
    for (const comm::WorkPtr& message : messages_) {
      if (!message->Poll()) {
        all = false;
      } else if (!message->status().ok()) {
        failure = message->status();
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
  Status told;
  const auto look = [&] {
    done = finished();
    const News* news = done ? nullptr : traffic_->ToldOf(id_);
    if (news != nullptr && Ends(*news, Now() - start)) told = news->cause;
    return done || !told.ok();
  };
  while (!traffic_->WaitUntil(look, Now() + kLook)) {
    const Nanos now = Now();
    if (const int64_t n = traffic_->moved_nbytes(); n != moved) {
      moved = n;
      moved_at = now;
    }
    if (limits_.stall_fail > 0 && now - start > limits_.stall_fail)
      TimeOut(now - start, "the other ranks have not come to it");
    if (agreed_ && now - moved_at > limits_.transport_timeout)
      TimeOut(now - start, "nothing moves any more");
    if (limits_.stall_warn > 0 && now - warned > limits_.stall_warn) {
      Log(LogLevel::kWarning, Who() + " has waited for " + Seconds(now - start) + " in " + what_);
      warned = now;
    }
  }
  if (done) return;
  pending_ = true;
  throw Error(told);
}

// Whether what this rank waits for cannot come any more. A message of a rank that has left may
// still be on its way.
bool Channel::Ends(const News& news, Nanos waited) const {
  if (news.finished < 0) return true;
  return place_ >= 0 ? news.finished <= place_ : waited > kLastMessages;
}

void Channel::TimeOut(Nanos waited, const std::string& why) {
  pending_ = true;
  throw Error(Kind::kTimeout,
              Who() + ": " + what_ + " is not done after " + Seconds(waited) + ": " + why);
}

std::string Channel::Who() const {
  return "rank " + std::to_string(members_[rank_]) + " in context '" + name_ + "'";
}

}  // namespace gradred::diff
