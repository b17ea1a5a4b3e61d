#include "diff/reduction.h"

#include <algorithm>
#include <cstring>

#include "reduce/convert.h"

namespace gradred::diff {
namespace {

// One tensor as a layout. Without `out` the result is not kept.
class TensorCargo final : public comm::Cargo {
 public:
  TensorCargo(const Input& in, void* out, double scale)
      : in_(static_cast<const char*>(in.data)),
        out_(static_cast<char*>(out)),
        dtype_(in.dtype),
        nbytes_(in.nbytes()),
        scale_(scale) {}

  void Pack(reduce::Range range, void* at) override {
    const int64_t n = Clip(range);
    std::memcpy(at, in_ + range.begin, static_cast<size_t>(n));
    // What follows the tensor is sent too.
    std::memset(static_cast<char*>(at) + n, 0, static_cast<size_t>(range.nbytes() - n));
  }
  void Unpack(reduce::Range range, const void* at) override {
    if (out_ == nullptr) return;
    reduce::Convert(out_ + range.begin, dtype_, at, dtype_, Clip(range) / DTypeSize(dtype_), scale_,
                    nullptr);
  }

 private:
  int64_t Clip(reduce::Range range) const {
    return std::max<int64_t>(std::min(range.end, nbytes_) - range.begin, 0);
  }
  const char* const in_;
  char* const out_;
  const DType dtype_;
  const int64_t nbytes_;
  const double scale_;
};

}  // namespace

void ReduceTensor(const Input& input, reduce::ReduceOp op, void* out, Channel& channel) {
  if (input.count() == 0) return;
  double scale = 1;
  if (op == reduce::ReduceOp::kAverage) {
    scale = IsHalf(input.dtype) ? channel.average_residual() : 1.0 / channel.size();
    if (!IsHalf(input.dtype)) op = reduce::ReduceOp::kSum;
  }
  const auto layout = std::make_shared<const reduce::Layout>(
      std::vector<reduce::Section>{{0, input.count(), input.dtype, op}});
  channel.AllReduce(layout, std::make_shared<TensorCargo>(input, out, scale));
}

}  // namespace gradred::diff
