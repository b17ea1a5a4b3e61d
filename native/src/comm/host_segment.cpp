#include "comm/host_segment.h"

#include <new>

namespace gradred::comm {
namespace {

class HostSegment : public Segment {
 public:
  explicit HostSegment(int64_t nbytes)
      : nbytes_(nbytes), data_(::operator new(reduce::AlignUp(nbytes), kAlignment)) {}
  ~HostSegment() override { ::operator delete(data_, kAlignment); }
  void* data() override { return data_; }
  int64_t nbytes() const override { return nbytes_; }
  Space space() const override { return Space::kHost; }

 private:
  static constexpr std::align_val_t kAlignment{reduce::kAlign};
  const int64_t nbytes_;
  void* const data_;
};

}  // namespace

SegmentPtr MakeHostSegment(int64_t nbytes) {
  if (nbytes < 0) {
    throw Error(Kind::kInvalidArgument,
                "a segment of " + std::to_string(nbytes) + " bytes: expected 0 or more");
  }
  try {
    return std::make_unique<HostSegment>(nbytes);
  } catch (const std::bad_alloc&) {
    throw Error(Kind::kUnsupported,
                "no host memory for a segment of " + std::to_string(nbytes) +
                    " bytes; use smaller fusion buffers or fewer ranks on this machine");
  }
}

}  // namespace gradred::comm
