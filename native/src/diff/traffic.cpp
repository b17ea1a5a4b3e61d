#include "diff/traffic.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"

namespace gradred::diff {
namespace {

constexpr size_t kLongestText = 2000;  // a datagram holds it

enum class Subject : uint8_t { kFailure, kLeaving, kWaiting };

Writer Begin(Subject subject, int context) {
  Writer out;
  out.Put(subject);
  out.Put<int32_t>(context);
  return out;
}

void PutStatus(Writer* out, const Status& status) {
  out->Put(status.kind());
  out->PutString(Shortened(status.message(), kLongestText));
}

Status GetStatus(Reader* in) {
  const Kind kind = in->Get<Kind>();
  return {kind, in->GetString()};
}

}  // namespace

bool Traffic::WaitUntil(const std::function<bool()>& finished, Nanos until) {
  std::unique_lock<std::mutex> lock(mutex_);
  comm::Backoff backoff;
  while (true) {
    const uint32_t ticket = transport_.bell().Ticket();
    TakeNews();
    if (finished()) break;
    const Nanos now = Now();
    if (now >= until) return false;
    if (watched_) {
      const uint64_t seen = looks_;
      ++waiting_;
      changed_.wait_for(lock, std::chrono::nanoseconds(until - now),
                        [&] { return looks_ != seen || !watched_; });
      --waiting_;
      continue;
    }
    watched_ = true;
    const Nanos length = backoff.NextSleep(now, transport_.MustPoll(), until - now);
    lock.unlock();
    if (length <= 0)
      sched_yield();
    else if (transport_.bell().Sleep(ticket, length))
      backoff.Reset();
    lock.lock();
    watched_ = false;
    ++looks_;
    if (waiting_ > 0) changed_.notify_all();
  }
  ++looks_;  // what was polled here may have finished others' work too
  if (waiting_ > 0) changed_.notify_all();
  return true;
}

void Traffic::Note(int context, const Status& failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Fail(context, failure);
    ++looks_;
    changed_.notify_all();
  }
  transport_.bell().Ring();  // last: who wakes finds it
}

void Traffic::TellFailure(int context, const Status& failure, const std::vector<int>& peers) {
  Writer out = Begin(Subject::kFailure, context);
  PutStatus(&out, failure);
  Post(peers, out.Take());
}

void Traffic::TellLeaving(int context, const Leaving& leaving, int peer) {
  Writer out = Begin(Subject::kLeaving, context);
  PutStatus(&out, leaving.cause);
  out.Put(leaving.finished);
  out.Put(leaving.sent);
  out.Put(leaving.received);
  Post({peer}, out.Take());
}

void Traffic::TellWaiting(int context, const std::string& what, int peer) {
  Writer out = Begin(Subject::kWaiting, context);
  out.PutString(Shortened(what, kLongestText));
  Post({peer}, out.Take());
}

void Traffic::Post(const std::vector<int>& peers, const std::string& bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const int peer : peers) {
    if (peer != transport_.rank()) transport_.Post(peer, bytes);
  }
}

void Traffic::TakeNews() {
  transport_.Progress();
  comm::Message message;
  while (transport_.TakePosted(&message)) {
    Reader in(message.bytes);
    const auto subject = in.Get<Subject>();
    const int context = in.Get<int32_t>();
    News& news = news_[context];
    switch (subject) {
      case Subject::kFailure:
        Fail(context, GetStatus(&in));
        break;
      case Subject::kLeaving: {
        Leaving& leaving = news.left[message.source];
        leaving.cause = GetStatus(&in);
        leaving.finished = in.Get<int64_t>();
        leaving.sent = in.Get<int64_t>();
        leaving.received = in.Get<int64_t>();
        break;
      }
      case Subject::kWaiting:
        if (std::string what = in.GetString(); what.empty())
          news.waiting.erase(message.source);
        else
          news.waiting[message.source] = std::move(what);
        break;
    }
  }
}

void Traffic::Fail(int context, const Status& failure) {
  Status& first = news_[context].failure;
  if (first.ok()) first = failure;
}

}  // namespace gradred::diff
