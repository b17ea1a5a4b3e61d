#include <chrono>
#include <condition_variable>
#include <mutex>

#include "comm/loopback/world.h"

namespace gradred::comm {
namespace {

// A round is open until all have come; its result is shared by those who wait for it.
class MeetingPoint {
 public:
  explicit MeetingPoint(int size) : size_(size) { Open(); }
  int size() const { return size_; }

  std::vector<std::string> AllGather(int rank, const std::string& mine, Nanos timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Round> round = round_;
    round->texts[rank] = mine;
    if (++round->arrived == size_) {
      Open();
      all_here_.notify_all();
    }
    const bool complete = all_here_.wait_for(lock, std::chrono::nanoseconds(timeout),
                                             [&] { return round->arrived == size_; });
    if (!complete) {
      throw Error(Kind::kTimeout, "rank " + std::to_string(rank) + ": " +
                                      std::to_string(round->arrived) + " of " +
                                      std::to_string(size_) + " ranks met within " +
                                      std::to_string(timeout / kMillisecond) + " ms");
    }
    return round->texts;
  }

 private:
  struct Round {
    int arrived = 0;
    std::vector<std::string> texts;
  };
  void Open() {
    round_ = std::make_shared<Round>();
    round_->texts.resize(size_);
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::shared_ptr<Round> round_;
};

class LoopbackBootstrap : public Bootstrap {
 public:
  LoopbackBootstrap(std::shared_ptr<MeetingPoint> point, int rank, Nanos timeout)
      : point_(std::move(point)), rank_(rank), timeout_(timeout) {}
  int rank() const override { return rank_; }
  int size() const override { return point_->size(); }
  std::vector<std::string> AllGather(const std::string& mine) override {
    return point_->AllGather(rank_, mine, timeout_);
  }

 private:
  const std::shared_ptr<MeetingPoint> point_;
  const int rank_;
  const Nanos timeout_;
};

}  // namespace

std::vector<std::unique_ptr<Bootstrap>> MakeLoopbackBootstraps(int size, Nanos timeout) {
  const auto point = std::make_shared<MeetingPoint>(size);
  std::vector<std::unique_ptr<Bootstrap>> bootstraps;
  for (int r = 0; r < size; ++r) {
    bootstraps.push_back(std::make_unique<LoopbackBootstrap>(point, r, timeout));
  }
  return bootstraps;
}

}  // namespace gradred::comm
