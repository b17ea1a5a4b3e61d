// A world that hands every call on to another, for tests that change one of them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.h"

namespace testing {

class ForwardingWorld : public gradred::comm::World {
 public:
  explicit ForwardingWorld(std::unique_ptr<gradred::comm::World> base) : base_(std::move(base)) {}

  const gradred::comm::Topology& topology() const override { return base_->topology(); }
  uint64_t nonce() const override { return base_->nonce(); }
  std::string Describe() const override { return base_->Describe(); }
  gradred::comm::Transport& control() override { return base_->control(); }
  gradred::comm::Transport& data() override { return base_->data(); }
  gradred::comm::Transport& side() override { return base_->side(); }
  gradred::comm::Transport& diff() override { return base_->diff(); }
  std::unique_ptr<gradred::comm::Communicator> MakeControl(const std::vector<int>& members,
                                                           int lane) override {
    return base_->MakeControl(members, lane);
  }
  std::unique_ptr<gradred::comm::Communicator> MakeData(const std::vector<int>& members,
                                                        int lane) override {
    return base_->MakeData(members, lane);
  }
  std::unique_ptr<gradred::comm::Communicator> MakeDiff(const std::vector<int>& members,
                                                        int context) override {
    return base_->MakeDiff(members, context);
  }
  int64_t network_nbytes() const override { return base_->network_nbytes(); }
  std::optional<gradred::comm::LostPeers> CheckPeers() override { return base_->CheckPeers(); }
  void Wait(gradred::comm::Work& work, gradred::Nanos timeout, const std::string& what) override {
    base_->Wait(work, timeout, what);
  }
  void Close() override { base_->Close(); }
  void Abort(const gradred::Status& cause) override { base_->Abort(cause); }

 protected:
  gradred::comm::World& base() { return *base_; }

 private:
  std::unique_ptr<gradred::comm::World> base_;
};

}  // namespace testing
