#include "comm/union_work.h"

#include <memory>

#include "base/graveyard.h"

namespace gradred::comm {
namespace {

// What the transport reads and writes; outlives the Work when a failure leaves a transfer running.
struct Messages {
  std::string sent, received;
  int64_t sent_nbytes = 0, received_nbytes = 0;
  WorkPtr send_size, send_body, receive_size, receive_body;
};

bool Finished(const WorkPtr& work) {
  if (!work) return true;
  if (!work->Poll()) return false;
  ThrowIfError(work->status());
  return true;
}

class UnionWork : public Work {
 public:
  UnionWork(Transport& transport, TagTurn turn, std::vector<Exchange> steps, std::string* blob,
            MergeFunction merge)
      : transport_(transport),
        turn_(std::move(turn)),
        steps_(std::move(steps)),
        blob_(blob),
        merge_(std::move(merge)) {}

  ~UnionWork() override {
    if (!messages_) return;
    for (const WorkPtr* work : {&messages_->send_size, &messages_->send_body,
                                &messages_->receive_size, &messages_->receive_body}) {
      if (*work && (!(*work)->Poll() || !(*work)->status().ok())) {
        Bury(messages_);
        return;
      }
    }
  }

 private:
  bool Advance() override {
    if (!turn_.HasCome()) return false;
    for (; current_ < steps_.size(); ++current_) {
      if (!messages_) Start(steps_[current_]);
      if (!StepFinished(steps_[current_])) return false;
      messages_.reset();
    }
    turn_.mine.reset();
    return true;
  }

  // The body follows its size at once: an exchange costs one latency.
  void Start(const Exchange& step) {
    messages_ = std::make_unique<Messages>();
    Messages& m = *messages_;
    if (step.receive_from >= 0) {
      m.receive_size = transport_.Recv(step.receive_from, turn_.tag, &m.received_nbytes,
                                       sizeof m.received_nbytes);
    }
    if (step.send_to >= 0) {
      m.sent = *blob_;
      m.sent_nbytes = static_cast<int64_t>(m.sent.size());
      m.send_size = transport_.Send(step.send_to, turn_.tag, &m.sent_nbytes, sizeof m.sent_nbytes);
      m.send_body = transport_.Send(step.send_to, turn_.tag, m.sent.data(), m.sent_nbytes);
    }
  }

  bool StepFinished(const Exchange& step) {
    Messages& m = *messages_;
    if (!Finished(m.receive_size)) return false;
    if (m.receive_size && !m.receive_body) {
      m.received.resize(m.received_nbytes);
      m.receive_body =
          transport_.Recv(step.receive_from, turn_.tag, m.received.data(), m.received_nbytes);
    }
    if (!Finished(m.receive_body) || !Finished(m.send_size) || !Finished(m.send_body)) return false;
    if (m.receive_body) {
      // The last step of a folded rank brings the result; everywhere else what comes is another
      // part of it.
      const bool result = step.send_to < 0 && current_ > 0;
      *blob_ = result ? std::move(m.received) : merge_(*blob_, m.received);
    }
    return true;
  }

  Transport& transport_;
  TagTurn turn_;
  const std::vector<Exchange> steps_;
  std::string* const blob_;
  const MergeFunction merge_;
  std::unique_ptr<Messages> messages_;  // of the current step
  size_t current_ = 0;
};

}  // namespace

WorkPtr RunUnion(Transport& transport, TagTurn turn, std::vector<Exchange> steps, std::string* blob,
                 MergeFunction merge) {
  auto work = std::make_unique<UnionWork>(transport, std::move(turn), std::move(steps), blob,
                                          std::move(merge));
  work->Poll();
  return work;
}

}  // namespace gradred::comm
