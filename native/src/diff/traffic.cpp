#include "diff/traffic.h"

#include <sched.h>

#include <algorithm>

#include "base/bytes.h"

namespace gradred::diff {
namespace {

constexpr size_t kLongestText = 2000;  // a datagram holds it

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

void Traffic::Note(int context, const News& news) {
  transport_.bell().Ring();
  std::lock_guard<std::mutex> lock(mutex_);
  Keep(context, news);
  ++looks_;
  changed_.notify_all();
}

void Traffic::Tell(int context, const News& news, const std::vector<int>& peers) {
  Writer out;
  out.Put<int32_t>(context);
  out.Put(news.finished);
  out.Put(news.cause.kind());
  out.PutString(news.cause.message().substr(0, kLongestText));
  const std::string bytes = out.Take();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const int peer : peers) {
    if (peer != transport_.rank()) transport_.Post(peer, bytes);
  }
}

const News* Traffic::ToldOf(int context) const {
  const auto at = news_.find(context);
  return at == news_.end() ? nullptr : &at->second;
}

void Traffic::TakeNews() {
  transport_.Progress();
  comm::Message message;
  while (transport_.TakePosted(&message)) {
    Reader in(message.bytes);
    const int context = in.Get<int32_t>();
    News news;
    news.finished = in.Get<int64_t>();
    const Kind kind = in.Get<Kind>();
    news.cause = Status(kind, in.GetString());
    Keep(context, news);
  }
}

void Traffic::Keep(int context, const News& news) {
  const auto [at, first] = news_.emplace(context, news);
  if (!first && news.finished < at->second.finished) at->second = news;
}

}  // namespace gradred::diff
