#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "comm/loopback/hub.h"

namespace gradred::comm {
namespace {

struct Receive {
  void* data = nullptr;
  int64_t nbytes = 0;
  bool finished = false;
  Status status;
};

// What has come and what is waited for, by source and tag, each in order.
struct Stream {
  std::deque<std::string> arrived;
  std::deque<std::shared_ptr<Receive>> posted;
};

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackHub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank), bell_(hub_->bell_word(rank), false) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) override;
  WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) override;
  void Post(int peer, const std::string& bytes) override;
  bool TakePosted(Message* message) override;
  void Progress() override;
  Doorbell& bell() override { return bell_; }
  Doorbell* BellOf(int) override { return nullptr; }
  bool MustPoll() const override { return false; }
  void Abort(const Status& cause) override;
  int64_t moved_nbytes() const override { return moved_.load(std::memory_order_relaxed); }

  void ThrowIfAborted() override {
    if (!aborted_.load(std::memory_order_acquire)) return;
    throw Error(cause_);
  }

 private:
  using Key = std::tuple<int, uint16_t, uint16_t>;  // source, channel, sequence

  void Check(int peer, Tag tag, int64_t nbytes, const char* what) const;
  void Match(const Key& key);

  const std::shared_ptr<LoopbackHub> hub_;
  const int rank_;
  Doorbell bell_;
  std::map<Key, Stream> streams_;  // those with something in them
  std::deque<Message> datagrams_;
  std::mutex abort_mutex_;
  std::atomic<int64_t> moved_{0};
  std::atomic<bool> aborted_{false};
  Status cause_;  // written once, before aborted_
};

// A send has finished when it has been copied.
class SendWork : public Work {
 public:
  explicit SendWork(LoopbackTransport& transport) : transport_(transport) {}

 private:
  bool Advance() override {
    transport_.ThrowIfAborted();
    return true;
  }
  LoopbackTransport& transport_;
};

class ReceiveWork : public Work {
 public:
  ReceiveWork(LoopbackTransport& transport, std::shared_ptr<Receive> receive)
      : transport_(transport), receive_(std::move(receive)) {}
  // Nothing is written to memory that nobody waits for.
  ~ReceiveWork() override { receive_->data = nullptr; }

 private:
  bool Advance() override {
    transport_.ThrowIfAborted();
    if (!receive_->finished) transport_.Progress();
    ThrowIfError(receive_->status);
    return receive_->finished;
  }
  LoopbackTransport& transport_;
  const std::shared_ptr<Receive> receive_;
};

void LoopbackTransport::Check(int peer, Tag tag, int64_t nbytes, const char* what) const {
  if (peer >= 0 && peer < size() && nbytes >= 0 && tag.channel < kChannels &&
      tag.sequence < kSequences) {
    return;
  }
  throw Error(Kind::kInvalidArgument,
              "rank " + std::to_string(rank_) + ": " + what + " with rank " + std::to_string(peer) +
                  " of " + std::to_string(size()) + ", channel " + std::to_string(tag.channel) +
                  ", sequence " + std::to_string(tag.sequence) + ", " + std::to_string(nbytes) +
                  " bytes: out of range");
}

WorkPtr LoopbackTransport::Send(int peer, Tag tag, const void* data, int64_t nbytes) {
  Check(peer, tag, nbytes, "send");
  if (!aborted_) {
    moved_.fetch_add(nbytes, std::memory_order_relaxed);
    hub_->Deliver(peer, {rank_, false, tag, std::string(static_cast<const char*>(data), nbytes)});
  }
  return std::make_unique<SendWork>(*this);
}

WorkPtr LoopbackTransport::Recv(int peer, Tag tag, void* data, int64_t nbytes) {
  Check(peer, tag, nbytes, "receive");
  auto receive = std::make_shared<Receive>();
  receive->data = data;
  receive->nbytes = nbytes;
  const Key key{peer, tag.channel, tag.sequence};
  streams_[key].posted.push_back(receive);
  Match(key);
  return std::make_unique<ReceiveWork>(*this, std::move(receive));
}

void LoopbackTransport::Post(int peer, const std::string& bytes) {
  const int64_t nbytes = static_cast<int64_t>(bytes.size());
  Check(peer, {}, nbytes, "post");
  if (nbytes > kMaxDatagram) {
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(rank_) + ": datagram to rank " +
                                            std::to_string(peer) + ": expected at most " +
                                            std::to_string(kMaxDatagram) + " bytes, got " +
                                            std::to_string(nbytes));
  }
  if (!aborted_) hub_->Deliver(peer, {rank_, true, {}, bytes});
}

bool LoopbackTransport::TakePosted(Message* message) {
  Progress();
  if (datagrams_.empty()) return false;
  *message = std::move(datagrams_.front());
  datagrams_.pop_front();
  return true;
}

void LoopbackTransport::Progress() {
  std::deque<LoopbackHub::Letter> letters;
  hub_->Collect(rank_, &letters);
  for (LoopbackHub::Letter& letter : letters) {
    if (letter.datagram) {
      datagrams_.push_back({letter.source, std::move(letter.bytes)});
      continue;
    }
    const Key key{letter.source, letter.tag.channel, letter.tag.sequence};
    streams_[key].arrived.push_back(std::move(letter.bytes));
    Match(key);
  }
}

void LoopbackTransport::Match(const Key& key) {
  const auto found = streams_.find(key);
  Stream& stream = found->second;
  while (!stream.arrived.empty() && !stream.posted.empty()) {
    const std::string& bytes = stream.arrived.front();
    Receive& receive = *stream.posted.front();
    const int64_t nbytes = static_cast<int64_t>(bytes.size());
    if (nbytes != receive.nbytes) {
      const auto& [source, channel, sequence] = key;
      receive.status =
          Status(Kind::kTransportError,
                 "rank " + std::to_string(rank_) + ": message from rank " + std::to_string(source) +
                     " (channel " + std::to_string(channel) + ", sequence " +
                     std::to_string(sequence) + "): expected " + std::to_string(receive.nbytes) +
                     " bytes, got " + std::to_string(nbytes));
    } else if (nbytes > 0 && receive.data) {
      std::memcpy(receive.data, bytes.data(), nbytes);
    }
    receive.finished = true;
    moved_.fetch_add(nbytes, std::memory_order_relaxed);
    stream.arrived.pop_front();
    stream.posted.pop_front();
  }
  if (stream.arrived.empty() && stream.posted.empty()) streams_.erase(found);
}

void LoopbackTransport::Abort(const Status& cause) {
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (!aborted_) {
      cause_ = cause;
      aborted_.store(true, std::memory_order_release);
    }
  }
  bell_.Ring();
}

}  // namespace

std::unique_ptr<Transport> LoopbackHub::MakeTransport(int rank) {
  return std::make_unique<LoopbackTransport>(shared_from_this(), rank);
}

}  // namespace gradred::comm
