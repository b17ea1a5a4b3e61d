#include "comm/alloc_on_all.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/graveyard.h"
#include "base/log.h"

namespace gradred::comm {
namespace {

void LogNoRoom(const Transport& transport, const std::string& why) {
  Log(LogLevel::kWarning, "rank " + std::to_string(transport.rank()) +
                              ": no more memory in which tensors are packed early, on all ranks; "
                              "they are packed when their group runs: " +
                              why);
}

class Agreement final : public Work {
 public:
  Agreement(Communicator& communicator, WorkPtr first, SegmentPtr* segment)
      : communicator_(communicator), first_(std::move(first)), segment_(segment), mail_(new Mail) {}
  ~Agreement() override {
    if (work_ != nullptr) Bury(mail_);  // unfinished: see Work
  }

 private:
  struct Mail {
    char mine = 0;          // 1: this rank has a segment
    std::vector<char> all;  // [size]
  };

  bool Advance() override {
    if (first_ != nullptr) {
      if (!first_->Poll()) return false;
      const Status status = first_->status();
      first_.reset();
      lacks_ = status.kind() == Kind::kUnsupported;
      if (!lacks_) ThrowIfError(status);
      if (lacks_) LogNoRoom(communicator_.transport(), status.message());
    }
    if (work_ == nullptr) {
      const auto size = static_cast<size_t>(communicator_.size());
      mail_->mine = *segment_ != nullptr && !lacks_ ? 1 : 0;
      mail_->all.resize(size);
      work_ =
          communicator_.AllGatherV(&mail_->mine, mail_->all.data(), std::vector<int64_t>(size, 1));
    }
    if (!work_->Poll()) return false;
    ThrowIfError(work_->status());
    work_.reset();
    if (std::count(mail_->all.begin(), mail_->all.end(), 0) > 0) segment_->reset();
    return true;
  }

  Communicator& communicator_;
  WorkPtr first_;
  SegmentPtr* const segment_;
  bool lacks_ = false;  // what `first` should have brought
  std::unique_ptr<Mail> mail_;
  WorkPtr work_;
};

}  // namespace

SegmentPtr AllocOrLog(Communicator& communicator, int64_t nbytes) {
  try {
    return communicator.Alloc(nbytes);
  } catch (const Error& error) {
    if (error.kind() != Kind::kUnsupported) throw;
    LogNoRoom(communicator.transport(), error.what());
    return nullptr;
  }
}

WorkPtr AgreeOnSegment(Communicator& communicator, WorkPtr first, SegmentPtr* segment) {
  return std::make_unique<Agreement>(communicator, std::move(first), segment);
}

WorkPtr Communicator::AllocOnAll(int64_t nbytes, SegmentPtr* segment) {
  *segment = AllocOrLog(*this, nbytes);
  return AgreeOnSegment(*this, nullptr, segment);
}

}  // namespace gradred::comm
