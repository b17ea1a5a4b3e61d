// What is summed: a run of bytes cut into typed sections, so that tensors of several dtypes and
// operations travel as one message.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace gradred::reduce {

enum class ReduceOp : uint8_t {
  kSum,
  kMin,
  kMax,
  kProduct,
  kAverage,  // float16 and bfloat16 only; other dtypes are summed and divided when unpacked. See
             // Note [Averages of halves]
  kBitAnd,   // uint8 only: the words of the negotiator
};
const char* ReduceOpName(ReduceOp op);

// Sections start at multiples of kAlign, and so does whatever part of a layout is reduced alone.
constexpr int64_t kAlign = 64;
inline int64_t AlignUp(int64_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }

struct Section {
  int64_t offset = 0;  // bytes, multiple of kAlign
  int64_t count = 0;   // elements
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};

struct Range {
  int64_t begin = 0, end = 0;  // bytes
  int64_t nbytes() const { return end - begin; }
};

// [0, nbytes) in `parts` ranges of nearly equal size that start at multiples of kAlign; trailing
// ones may be empty.
std::vector<Range> Split(int64_t nbytes, int parts);

// Note [Order of summation]
// The tree in which the ranks' values of one element are added depends on the ranks alone, never on
// the element's offset, its group, the chunk or the plan, so that regrouping does not change
// results. Inside a node: ascending local rank, float32 accumulators for halves (own type for the
// others), one rounding at the end (ReduceNode). Between nodes: pairs at distance p/2, p/4, ..., 1
// with p the largest power of two that fits, after a fixed fold of the nodes beyond p (ReduceHop).

// Note [Averages of halves]
// A sum of float16 overflows at 65504 and a mean that divides first loses small values. So averages
// of halves are kept at the magnitude of their inputs all the way: the node sums in float32,
// multiplies by 2^-ceil(log2(local_size)) and rounds once; each hop between nodes adds in float32,
// halves and rounds. All factors are powers of two. What is missing to the mean, size against the
// product of these powers, is applied in float32 when unpacked (Communicator::average_residual).

class Layout {
 public:
  // Throws kInvalidArgument for overlapping or unaligned sections and for an op that the dtype does
  // not have (average of anything but halves; bit-and of anything but uint8). Sum, min, max,
  // product of bool are or, and, or, and.
  explicit Layout(std::vector<Section> sections);

  const std::vector<Section>& sections() const { return sections_; }
  int64_t nbytes() const {
    return nbytes_;
  }  // up to the end of the last section, rounded up to kAlign

  // out[range] = ins[0][range] + ins[1][range] + ... in this order. `out` may be one of `ins`. All
  // pointers are to the start of the layout. `node_scale` multiplies sections of kAverage before
  // the rounding. Gaps are not written. range.begin and range.end are multiples of kAlign.
  void ReduceNode(void* out, const void* const* ins, int n, Range range, float node_scale) const;

  // out[range] = a[range] + b[range] with one rounding; sections of kAverage: half of it. `out` may
  // be `a` or `b`.
  void ReduceHop(void* out, const void* a, const void* b, Range range) const;

  // Halves the sections of kAverage in place, leaves the others: the hop of a rank that has no
  // partner in a fold.
  void HopAlone(void* data, Range range) const;

 private:
  std::vector<Section> sections_;
  int64_t nbytes_ = 0;
};

}  // namespace gradred::reduce
