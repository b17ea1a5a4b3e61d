#include "comm/shm/transport.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <string>
#include <vector>

namespace gradred::comm::shm {
namespace {

// Written by one Progress to one peer, so that a fast reader cannot hold the writer there.
constexpr int64_t kFlushNbytes = 1 << 20;

enum class FrameKind : uint32_t { kMessage = 1, kDatagram = 2 };

// Precedes the bytes of each message in a ring.
struct Frame {
  int64_t nbytes;
  Tag tag;
  FrameKind kind;
};
static_assert(sizeof(Frame) == 16 && sizeof(Tag) == 4);

bool SameTag(Tag a, Tag b) { return a.channel == b.channel && a.sequence == b.sequence; }

// Shared by a Work and the transport: either may go first.
struct Request {
  Tag tag;
  char* data = nullptr;  // of a receive
  int64_t nbytes = 0;
  bool done = false;
  Status failure;
};
using RequestPtr = std::shared_ptr<Request>;

struct Outgoing {
  Frame frame;
  const char* data;
  RequestPtr request;  // null: a datagram, which owns its bytes
  std::string datagram;
  int64_t sent = 0;  // of the payload
  bool started = false;
};

// A message that has begun to come in.
struct Incoming {
  Frame frame;
  int64_t received = 0;
  char* to = nullptr;              // null: its bytes are dropped
  std::unique_ptr<char[]> buffer;  // while no receive is posted
  RequestPtr request;              // null while no receive is posted
};
using IncomingPtr = std::shared_ptr<Incoming>;

struct Peer {
  Peer(RingHeader* out, RingHeader* in, int64_t capacity)
      : writer(out, capacity), reader(in, capacity) {}
  RingWriter writer;
  RingReader reader;
  std::deque<Outgoing> outgoing;
  std::vector<RequestPtr> posted;     // receives without a message, in the order of their posting
  std::list<IncomingPtr> unexpected;  // messages without a receive, in the order of their coming
  IncomingPtr current;                // not yet whole
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<Page> page, int number, int index)
      : page_(std::move(page)),
        number_(number),
        index_(index),
        bell_(&page_->member(index).bells[number], page_->members() > 1) {
    for (int i = 0; i < size(); ++i) {
      peers_.emplace_back(page_->ring(number, index, i), page_->ring(number, i, index),
                          page_->ring_nbytes());
      bells_.emplace_back(&page_->member(i).bells[number], true);
    }
  }

  int rank() const override { return index_; }
  int size() const override { return page_->members(); }
  WorkPtr Send(int peer, Tag tag, const void* data, int64_t nbytes) override;
  WorkPtr Recv(int peer, Tag tag, void* data, int64_t nbytes) override;
  void Post(int peer, const std::string& bytes) override;
  bool TakePosted(Message* message) override;
  void Progress() override;
  Doorbell& bell() override { return bell_; }
  bool MustPoll() const override { return false; }
  Doorbell* BellOf(int peer) override { return &bells_[static_cast<size_t>(peer)]; }
  void Abort(const Status& cause) override;
  int64_t moved_nbytes() const override { return moved_.load(std::memory_order_relaxed); }
  void CountMoved(int64_t nbytes) override { moved_.fetch_add(nbytes, std::memory_order_relaxed); }
  void ThrowIfAborted() override;

 private:
  Peer& PeerAt(int peer, int64_t nbytes);
  void Flush(int peer);
  void Drain(int peer);
  void Begin(int peer);
  void Complete(int peer, const IncomingPtr& message);
  void Match(int peer, const IncomingPtr& message, const RequestPtr& request);
  void DeliverToSelf(Frame frame, const void* data);

  std::shared_ptr<Page> page_;
  int number_, index_;
  Doorbell bell_;
  std::vector<Peer> peers_;
  std::vector<Doorbell> bells_;
  std::deque<Message> datagrams_;
  std::atomic<int64_t> moved_{0};
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // of cause_
  Status cause_;
};

class RequestWork final : public Work {
 public:
  RequestWork(ShmTransport* transport, RequestPtr request)
      : transport_(transport), request_(std::move(request)) {}

 private:
  bool Advance() override {
    if (!request_->done) {
      transport_->ThrowIfAborted();
      transport_->Progress();
    }
    ThrowIfError(request_->failure);
    return request_->done;
  }
  ShmTransport* transport_;
  RequestPtr request_;
};

void ShmTransport::ThrowIfAborted() {
  if (!aborted_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  throw Error(cause_);
}

void ShmTransport::Abort(const Status& cause) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (cause_.ok()) cause_ = cause;
  }
  aborted_.store(true, std::memory_order_release);
  bell_.Ring();
}

Peer& ShmTransport::PeerAt(int peer, int64_t nbytes) {
  if (peer < 0 || peer >= size() || nbytes < 0) {
    throw Error(Kind::kInvalidArgument,
                "rank " + std::to_string(index_) + " of " + std::to_string(size()) +
                    " in shared memory: a message of " + std::to_string(nbytes) +
                    " bytes with rank " + std::to_string(peer));
  }
  return peers_[static_cast<size_t>(peer)];
}

WorkPtr ShmTransport::Send(int peer, Tag tag, const void* data, int64_t nbytes) {
  Peer& to = PeerAt(peer, nbytes);
  auto request = std::make_shared<Request>();
  const Frame frame{nbytes, tag, FrameKind::kMessage};
  if (aborted_.load(std::memory_order_acquire)) {
    // The Work says why.
  } else if (peer == index_) {
    DeliverToSelf(frame, data);
    request->done = true;
  } else {
    to.outgoing.push_back({frame, static_cast<const char*>(data), request, {}});
    Flush(peer);
  }
  return std::make_unique<RequestWork>(this, std::move(request));
}

WorkPtr ShmTransport::Recv(int peer, Tag tag, void* data, int64_t nbytes) {
  Peer& from = PeerAt(peer, nbytes);
  auto request = std::make_shared<Request>();
  request->tag = tag;
  request->data = static_cast<char*>(data);
  request->nbytes = nbytes;
  if (!aborted_.load(std::memory_order_acquire)) {
    const auto found =
        std::find_if(from.unexpected.begin(), from.unexpected.end(),
                     [&](const IncomingPtr& message) { return SameTag(message->frame.tag, tag); });
    if (found == from.unexpected.end()) {
      from.posted.push_back(request);
    } else {
      const IncomingPtr message = *found;
      from.unexpected.erase(found);
      Match(peer, message, request);
      if (message->received == message->frame.nbytes) Complete(peer, message);
    }
  }
  return std::make_unique<RequestWork>(this, std::move(request));
}

void ShmTransport::Post(int peer, const std::string& bytes) {
  const auto nbytes = static_cast<int64_t>(bytes.size());
  Peer& to = PeerAt(peer, nbytes);
  if (nbytes > kMaxDatagram) {
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(index_) + ": a datagram of " +
                                            std::to_string(nbytes) + " bytes, at most " +
                                            std::to_string(kMaxDatagram) + " are possible");
  }
  if (aborted_.load(std::memory_order_acquire)) return;
  if (peer == index_) {
    datagrams_.push_back({index_, bytes});
    bell_.Ring();
    return;
  }
  Outgoing datagram{Frame{nbytes, {}, FrameKind::kDatagram}, nullptr, nullptr, bytes};
  to.outgoing.push_back(std::move(datagram));
  Flush(peer);
}

bool ShmTransport::TakePosted(Message* message) {
  if (datagrams_.empty()) Progress();
  if (datagrams_.empty()) return false;
  *message = std::move(datagrams_.front());
  datagrams_.pop_front();
  return true;
}

void ShmTransport::Progress() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == index_) continue;
    if (aborted_.load(std::memory_order_acquire)) return;
    if (!peers_[static_cast<size_t>(peer)].outgoing.empty()) Flush(peer);
    if (peers_[static_cast<size_t>(peer)].reader.Available() > 0) Drain(peer);
  }
}

// Writes as much as there is room for, in pieces, so that the reader works on one while the next is
// written.
void ShmTransport::Flush(int peer) {
  Peer& to = peers_[static_cast<size_t>(peer)];
  const int64_t piece = page_->ring_nbytes() / 4;
  int64_t left = kFlushNbytes;
  bool asked = false;
  while (!to.outgoing.empty()) {
    if (left <= 0) {
      bell_.Ring();  // there is more to do: the owner must not sleep
      return;
    }
    Outgoing& message = to.outgoing.front();
    int64_t free = to.writer.Free();
    bool moved = false;
    if (!message.started && free >= static_cast<int64_t>(sizeof(Frame))) {
      to.writer.Write(&message.frame, sizeof(Frame));
      free -= static_cast<int64_t>(sizeof(Frame));
      message.started = moved = true;
    }
    if (message.started) {
      const char* data = message.request == nullptr ? message.datagram.data() : message.data;
      const int64_t n = std::min({message.frame.nbytes - message.sent, free, piece});
      if (n > 0) {
        to.writer.Write(data + message.sent, n);
        message.sent += n;
        if (message.request != nullptr) moved_.fetch_add(n, std::memory_order_relaxed);
        left -= n;
        moved = true;
      }
    }
    if (moved) {
      asked = false;
      to.writer.Publish();
      bells_[static_cast<size_t>(peer)].Ring();
    }
    if (message.started && message.sent == message.frame.nbytes) {
      if (message.request != nullptr) message.request->done = true;
      to.outgoing.pop_front();
    } else if (!moved) {
      if (asked) return;
      to.writer.AskForSpace();
      asked = true;
    }
  }
}

// Takes what had come when it started: a fast writer cannot hold this thread here.
void ShmTransport::Drain(int peer) {
  Peer& from = peers_[static_cast<size_t>(peer)];
  int64_t left = from.reader.Available();
  while (true) {
    if (from.current == nullptr) {
      if (left < static_cast<int64_t>(sizeof(Frame))) break;
      Begin(peer);
      if (from.current == nullptr) return;
      left -= static_cast<int64_t>(sizeof(Frame));
    }
    const IncomingPtr message = from.current;
    const int64_t n = std::min(message->frame.nbytes - message->received, left);
    from.reader.Read(message->to == nullptr ? nullptr : message->to + message->received, n);
    message->received += n;
    if (message->frame.kind == FrameKind::kMessage) moved_.fetch_add(n, std::memory_order_relaxed);
    left -= n;
    if (from.reader.Release()) bells_[static_cast<size_t>(peer)].Ring();
    if (message->received < message->frame.nbytes) break;
    from.current = nullptr;
    Complete(peer, message);
  }
}

// Reads a frame and finds where its bytes go. A frame that cannot be ends everything: nothing after
// it can be understood.
void ShmTransport::Begin(int peer) {
  Peer& from = peers_[static_cast<size_t>(peer)];
  auto message = std::make_shared<Incoming>();
  from.reader.Read(&message->frame, sizeof(Frame));
  const Frame& frame = message->frame;
  if (frame.nbytes < 0 ||
      (frame.kind != FrameKind::kMessage && frame.kind != FrameKind::kDatagram)) {
    Abort({Kind::kTransportError, "rank " + std::to_string(index_) + ": the stream from rank " +
                                      std::to_string(peer) + " in shared memory is damaged"});
    return;
  }
  if (frame.kind == FrameKind::kMessage) {
    const auto found =
        std::find_if(from.posted.begin(), from.posted.end(),
                     [&](const RequestPtr& request) { return SameTag(request->tag, frame.tag); });
    if (found != from.posted.end()) {
      const RequestPtr request = *found;
      from.posted.erase(found);
      Match(peer, message, request);
      from.current = std::move(message);
      return;
    }
    from.unexpected.push_back(message);
  }
  message->buffer.reset(new char[static_cast<size_t>(std::max<int64_t>(frame.nbytes, 1))]);
  message->to = message->buffer.get();
  from.current = std::move(message);
}

// The bytes that have come go to the receive, the others will follow there.
void ShmTransport::Match(int peer, const IncomingPtr& message, const RequestPtr& request) {
  message->request = request;
  message->to = request->data;
  if (request->nbytes != message->frame.nbytes) {
    message->to = nullptr;
    request->failure = {Kind::kTransportError,
                        "rank " + std::to_string(index_) + " in shared memory: expected " +
                            std::to_string(request->nbytes) + " bytes from rank " +
                            std::to_string(peer) + " on channel " +
                            std::to_string(request->tag.channel) + ", got " +
                            std::to_string(message->frame.nbytes)};
    request->done = true;
  } else if (message->buffer != nullptr && message->received > 0) {
    std::memcpy(request->data, message->buffer.get(), static_cast<size_t>(message->received));
  }
  message->buffer.reset();
}

void ShmTransport::Complete(int peer, const IncomingPtr& message) {
  if (message->frame.kind == FrameKind::kDatagram) {
    datagrams_.push_back(
        {peer, std::string(message->buffer.get(), static_cast<size_t>(message->frame.nbytes))});
  } else if (message->request != nullptr) {
    message->request->done = true;
  }
}

void ShmTransport::DeliverToSelf(Frame frame, const void* data) {
  Peer& me = peers_[static_cast<size_t>(index_)];
  auto message = std::make_shared<Incoming>();
  message->frame = frame;
  const auto found =
      std::find_if(me.posted.begin(), me.posted.end(),
                   [&](const RequestPtr& request) { return SameTag(request->tag, frame.tag); });
  if (found != me.posted.end()) {
    const RequestPtr request = *found;
    me.posted.erase(found);
    Match(index_, message, request);
  } else {
    message->buffer.reset(new char[static_cast<size_t>(std::max<int64_t>(frame.nbytes, 1))]);
    message->to = message->buffer.get();
    me.unexpected.push_back(message);
  }
  if (message->to != nullptr && frame.nbytes > 0) {
    std::memcpy(message->to, data, static_cast<size_t>(frame.nbytes));
  }
  message->received = frame.nbytes;
  Complete(index_, message);
  bell_.Ring();
}

}  // namespace

std::unique_ptr<Transport> MakeTransport(std::shared_ptr<Page> page, int number, int index) {
  return std::make_unique<ShmTransport>(std::move(page), number, index);
}

}  // namespace gradred::comm::shm
