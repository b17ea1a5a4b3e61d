// Negotiators of simulated ranks in one thread: rounds and unions complete when all ranks of the
// set have entered, on a virtual clock.
#pragma once

#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/negotiator.h"
#include "testing.h"

namespace protocol {

using namespace gradred;
using namespace gradred::core;

// Events in the order of their virtual times, those of equal times in the order of Post.
class VirtualClock {
 public:
  Nanos now() const { return now_; }
  void Post(Nanos delay, std::function<void()> fn) {
    queue_.push({now_ + delay, posted_++, std::move(fn)});
  }
  // False when nothing is left.
  bool RunOne() {
    if (queue_.empty()) return false;
    Item item = queue_.top();
    queue_.pop();
    now_ = item.time;
    item.fn();
    return true;
  }
  // What happens until `time` from now.
  void RunFor(Nanos time) {
    bool over = false;
    Post(time, [&over] { over = true; });
    while (!over) RunOne();
  }
  void RunAll(int64_t limit = 10'000'000) {
    while (RunOne()) testing::Check(limit-- > 0, "the simulation ends", __FILE__, __LINE__);
  }

 private:
  struct Item {
    Nanos time;
    int64_t order;
    std::function<void()> fn;
    bool operator<(const Item& o) const {
      return std::tie(time, order) > std::tie(o.time, o.order);  // the earliest on top
    }
  };
  Nanos now_ = 0;
  int64_t posted_ = 0;
  std::priority_queue<Item> queue_;
};

// One process set. Run, Fail, AllJoined and AllShutDown reach `on_action(rank, action)`, in order.
class Set {
 public:
  using OnAction = std::function<void(int rank, const Action&)>;

  Set(VirtualClock* clock, int size, NegotiatorOptions options, OnAction on_action,
      uint64_t seed = 1, Nanos latency = 20 * kMicrosecond, Nanos jitter = 0)
      : clock_(clock),
        latency_(latency),
        jitter_(jitter),
        on_action_(std::move(on_action)),
        random_(seed) {
    for (int rank = 0; rank < size; ++rank) {
      options.rank = rank;
      options.size = size;
      negotiators_.push_back(std::make_unique<Negotiator>(options));
    }
    words_.resize(size);
    in_flight_.assign(size, false);
    blobs_.resize(size);
    wakes_.assign(size, kForever);
  }

  int size() const { return static_cast<int>(negotiators_.size()); }
  Negotiator& at(int rank) { return *negotiators_[rank]; }
  bool InFlight(int rank) const { return in_flight_[rank]; }  // its words are with the others
  int64_t union_bytes() const { return union_bytes_; }

  void Send(int rank, const Event& event) {
    std::vector<Action> actions;
    if (std::holds_alternative<RoundDone>(event)) in_flight_[rank] = false;
    at(rank).Step(event, clock_->now(), &actions);
    for (const Action& action : actions) {
      if (const auto* round = std::get_if<StartRound>(&action)) {
        // Nothing but what rounds agreed on may have moved a table.
        const uint64_t digest = at(rank).TableDigest();
        if (entered_ == 0) digest_ = digest;
        CHECK_EQ(digest, digest_);
        words_[rank] = round->words;
        in_flight_[rank] = true;
        if (++entered_ == size()) FinishRound();
      } else if (const auto* exchange = std::get_if<StartUnion>(&action)) {
        blobs_[rank] = exchange->blob;
        if (++entered_ == size()) FinishUnion();
      } else {
        on_action_(rank, action);
      }
    }
    const Nanos wake = at(rank).NextWake();
    if (wake != kForever && wake != wakes_[rank]) {
      wakes_[rank] = wake;
      clock_->Post(wake - clock_->now(), [this, rank, wake] {
        if (at(rank).NextWake() == wake) Send(rank, Tick{});
      });
    }
  }

 private:
  void FinishRound() {
    entered_ = 0;
    std::vector<uint64_t> all = words_[0];
    for (const auto& words : words_) {
      CHECK_EQ(words.size(), all.size());
      for (size_t i = 0; i < all.size(); ++i) all[i] &= words[i];
    }
    Deliver(RoundDone{std::move(all)});
  }

  void FinishUnion() {
    entered_ = 0;
    std::vector<std::string> blobs = blobs_;  // merged pairwise in a random order
    while (blobs.size() > 1) {
      std::swap(blobs[random_() % blobs.size()], blobs.back());
      std::string last = std::move(blobs.back());
      blobs.pop_back();
      std::string& other = blobs[random_() % blobs.size()];
      other = Negotiator::Merge(last, other);
    }
    union_bytes_ += static_cast<int64_t>(blobs[0].size());
    Deliver(UnionDone{std::move(blobs[0])});
  }

  // The ranks hear of it one after another, with time for other events in between.
  void Deliver(Event event) {
    const auto shared = std::make_shared<const Event>(std::move(event));
    for (int rank = 0; rank < size(); ++rank) {
      const Nanos jitter = jitter_ > 0 ? static_cast<Nanos>(random_() % jitter_) : 0;
      clock_->Post(latency_ + jitter, [this, shared, rank] { Send(rank, *shared); });
    }
  }

  VirtualClock* clock_;
  const Nanos latency_, jitter_;
  const OnAction on_action_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Negotiator>> negotiators_;
  std::vector<std::vector<uint64_t>> words_;
  std::vector<std::string> blobs_;
  std::vector<Nanos> wakes_;
  std::vector<bool> in_flight_;
  int entered_ = 0;
  uint64_t digest_ = 0;
  int64_t union_bytes_ = 0;
};

}  // namespace protocol
