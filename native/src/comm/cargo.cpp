// The reduction of a cargo for communicators that have none of their own.
#include <algorithm>
#include <utility>

#include "base/graveyard.h"
#include "comm/communicator.h"

namespace gradred::comm {
namespace {

class WholeCargo final : public Work {
 public:
  WholeCargo(Communicator& communicator, LayoutPtr layout, CargoPtr cargo)
      : layout_(std::move(layout)),
        cargo_(std::move(cargo)),
        segment_(communicator.Alloc(std::max(layout_->nbytes(), reduce::kAlign))) {
    const reduce::Range all{0, layout_->nbytes()};
    if (all.nbytes() > 0) cargo_->Pack(all, segment_->data());
    work_ = communicator.AllReduce(*segment_, 0, layout_);
  }
  ~WholeCargo() override {
    if (work_) Bury(segment_);  // unfinished: see Work
  }

 private:
  bool Advance() override {
    if (!work_->Poll()) return false;
    ThrowIfError(work_->status());
    if (layout_->nbytes() > 0) cargo_->Unpack({0, layout_->nbytes()}, segment_->data());
    work_.reset();
    return true;
  }

  const LayoutPtr layout_;
  const CargoPtr cargo_;
  SegmentPtr segment_;
  WorkPtr work_;
};

}  // namespace

WorkPtr Communicator::AllReduceCargo(LayoutPtr layout, CargoPtr cargo) {
  return std::make_unique<WholeCargo>(*this, std::move(layout), std::move(cargo));
}

}  // namespace gradred::comm
