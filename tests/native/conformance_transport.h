// What every Transport must do. Called by every rank: in threads, or by each process for itself.
#pragma once

#include <map>
#include <numeric>
#include <thread>

#include "conformance_options.h"

namespace conformance {

class TransportSuite {
 public:
  TransportSuite(comm::Transport& transport, const ConformanceOptions& options)
      : transport_(transport),
        options_(options),
        random_(Hash(options.seed, transport.rank(), 1)) {}

  void Run() {
    CheckAllPairs();
    CheckOrder();
    CheckDatagrams();
    CheckWrongSize(8, 4);
    CheckWrongSize(4, 8);
    CheckWrongSize(options_.long_nbytes, options_.long_nbytes + 1);
    Meet();
    if (options_.abort) CheckAbort();
  }

 private:
  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }

  void Await(comm::Work& work, const std::string& what) {
    const Status status = comm::Wait(work, transport_, options_.timeout, what);
    if (!status.ok()) Fail(what, status.ToString());
  }
  [[noreturn]] void Fail(const std::string& what, const std::string& text) {
    transport_.Abort({Kind::kInternal, "the conformance suite has failed"});
    throw testing::Failure(options_.name + ", rank " + std::to_string(rank()) + " of " +
                           std::to_string(size()) + ": " + what + ": " + text);
  }
  void Expect(bool ok, const std::string& what, const std::string& text) {
    if (!ok) Fail(what, text);
  }

  Bytes Content(int from, int to, int64_t nbytes) const {
    Bytes bytes(nbytes);
    for (int64_t i = 0; i < nbytes; ++i) {
      bytes[i] = static_cast<char>(Hash(options_.seed + nbytes, from * 1000 + to, i));
    }
    return bytes;
  }

  // All ranks have come here and all their messages have arrived.
  void Meet() {
    std::vector<comm::WorkPtr> works;
    for (int r = 0; r < size(); ++r) {
      works.push_back(transport_.Recv(r, {9, 9}, nullptr, 0));
      works.push_back(transport_.Send(r, {9, 9}, nullptr, 0));
    }
    for (auto& work : works) Await(*work, "meeting");
  }

  // Everybody to everybody, itself included, receives before or after sends.
  void CheckAllPairs() {
    for (const int64_t nbytes : {int64_t{0}, int64_t{1}, int64_t{4097}, options_.long_nbytes}) {
      const std::string what = "messages of " + std::to_string(nbytes) + " bytes";
      const comm::Tag tag{3, 5};
      std::vector<Bytes> sent(size()), received(size(), Bytes(nbytes));
      std::vector<comm::WorkPtr> works;
      const auto receive = [&] {
        for (int r = 0; r < size(); ++r) {
          works.push_back(transport_.Recv(r, tag, received[r].data(), nbytes));
        }
      };
      const bool receive_first = random_() % 2 == 0;
      if (receive_first) receive();
      for (int r = 0; r < size(); ++r) {
        sent[r] = Content(rank(), r, nbytes);
        works.push_back(transport_.Send(r, tag, sent[r].data(), nbytes));
      }
      if (!receive_first) receive();
      std::shuffle(works.begin(), works.end(), random_);
      for (auto& work : works) Await(*work, what);
      for (int r = 0; r < size(); ++r) {
        Expect(received[r] == Content(r, rank(), nbytes), what,
               "wrong bytes from rank " + std::to_string(r));
      }
    }
  }

  // Messages of one tag in order, short after long ones too; tags apart from each other.
  void CheckOrder() {
    const std::vector<int64_t> sizes = {5, options_.long_nbytes, 0, 7, 7, options_.long_nbytes, 1};
    const std::vector<comm::Tag> tags = {
        {0, 0}, {0, 1}, {1, 0}, {comm::kChannels - 1, comm::kSequences - 1}};
    const int to = (rank() + 1) % size(), from = (rank() + size() - 1) % size();
    std::vector<std::vector<Bytes>> sent(tags.size()), received(tags.size());
    std::vector<comm::WorkPtr> works;
    for (size_t k = 0; k < sizes.size();
         ++k) {  // sends: message by message; receives: tag by tag, last first
      for (size_t t = 0; t < tags.size(); ++t) {
        sent[t].push_back(
            Content(rank() + 100 * static_cast<int>(t), static_cast<int>(k), sizes[k]));
        works.push_back(transport_.Send(to, tags[t], sent[t].back().data(), sizes[k]));
      }
    }
    for (size_t t = tags.size(); t-- > 0;) {
      for (const int64_t n : sizes) {
        received[t].emplace_back(n);
        works.push_back(transport_.Recv(from, tags[t], received[t].back().data(), n));
      }
    }
    std::shuffle(works.begin(), works.end(), random_);
    for (auto& work : works) Await(*work, "order of messages");
    for (size_t t = 0; t < tags.size(); ++t) {
      for (size_t k = 0; k < sizes.size(); ++k) {
        Expect(received[t][k] ==
                   Content(from + 100 * static_cast<int>(t), static_cast<int>(k), sizes[k]),
               "order of messages",
               "tag " + std::to_string(t) + ", message " + std::to_string(k) + " is another one");
      }
    }
  }

  void CheckDatagrams() {
    const std::vector<int64_t> sizes = {1, 100, comm::kMaxDatagram, 8};
    std::map<std::pair<int, std::string>, int> missing;
    for (const int64_t n : sizes) {
      for (int r = 0; r < size(); ++r) {
        const Bytes out = Content(rank(), r, n), in = Content(r, rank(), n);
        transport_.Post(r, std::string(out.begin(), out.end()));
        ++missing[{r, std::string(in.begin(), in.end())}];
      }
    }
    const Nanos start = Now();
    comm::Backoff backoff;
    while (!missing.empty()) {
      const uint32_t ticket = transport_.bell().Ticket();
      transport_.Progress();
      comm::Message message;
      if (transport_.TakePosted(&message)) {
        const auto found = missing.find({message.source, message.bytes});
        Expect(found != missing.end(), "datagrams",
               "one of " + std::to_string(message.bytes.size()) + " bytes from rank " +
                   std::to_string(message.source) + " was not sent or comes twice");
        if (--found->second == 0) missing.erase(found);
        backoff.Reset();
        continue;
      }
      const Nanos left = options_.timeout - (Now() - start);
      Expect(left > 0, "datagrams", std::to_string(missing.size()) + " did not arrive");
      backoff.Pause(transport_.bell(), ticket, transport_.MustPoll(), left);
    }
    comm::Message message;
    Expect(!transport_.TakePosted(&message), "datagrams", "more came than were sent");
  }

  void CheckWrongSize(int64_t sent_nbytes, int64_t expected_nbytes) {
    const int to = (rank() + 1) % size(), from = (rank() + size() - 1) % size();
    const comm::Tag tag{7, 3};
    const Bytes sent(sent_nbytes);
    Bytes received(expected_nbytes);
    const auto receive = transport_.Recv(from, tag, received.data(), expected_nbytes);
    const auto send = transport_.Send(to, tag, sent.data(), sent_nbytes);
    const Status status = comm::Wait(*receive, transport_, options_.timeout, "wrong size");
    const std::string text = status.ToString();
    Expect(status.kind() == Kind::kTransportError &&
               text.find(std::to_string(sent_nbytes)) != std::string::npos &&
               text.find(std::to_string(expected_nbytes)) != std::string::npos,
           "a message of a wrong size",
           "expected TransportError with " + std::to_string(expected_nbytes) + " and " +
               std::to_string(sent_nbytes) + ", got " + text);
    (void)comm::Wait(*send, transport_, options_.timeout, "send of a wrong size");
  }

  // The last check: afterwards the transport is of no use.
  void CheckAbort() {
    const Status cause(Kind::kPeerLost, "rank 77 of the conformance suite is lost");
    const int peer = (rank() + 1) % size();
    char byte = 0;
    const auto pending = transport_.Recv(peer, {11, 2}, &byte, 1);
    Expect(!pending->Poll(), "abort", "a receive has finished without a message");
    std::thread other([&] { transport_.Abort(cause); });
    const Status status = comm::Wait(*pending, transport_, options_.timeout, "abort");
    other.join();
    transport_.Abort({Kind::kInternal, "a second cause"});
    CheckCause(cause, status, "pending receive");
    const auto receive = transport_.Recv(peer, {11, 3}, &byte, 1);
    CheckCause(cause, comm::Wait(*receive, transport_, options_.timeout, "abort"), "new receive");
    const auto send = transport_.Send(peer, {11, 4}, &byte, 1);
    CheckCause(cause, comm::Wait(*send, transport_, options_.timeout, "abort"), "new send");
    transport_.Post(peer, "x");
    transport_.Progress();
  }
  void CheckCause(const Status& expected, const Status& got, const std::string& what) {
    Expect(got.kind() == expected.kind() && got.message() == expected.message(), "abort, " + what,
           "expected " + expected.ToString() + ", got " + got.ToString());
  }

  comm::Transport& transport_;
  const ConformanceOptions& options_;
  std::mt19937_64 random_;  // of this rank
};

// Throws testing::Failure. Collective over the transport's ranks. Nothing else may be under way on
// it; with options.abort the transport is aborted at the end.
inline void CheckTransport(comm::Transport& transport, const ConformanceOptions& options) {
  TransportSuite(transport, options).Run();
}

}  // namespace conformance
