// The loops under Layout and Convert, compiled for several instruction sets and chosen at run time.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "reduce/convert.h"
#include "reduce/layout.h"

namespace gradred::reduce {

constexpr int kReduceOpCount = 6;

// out[i] = ins[0][i] op ins[1][i] op ... in this order, for `count` elements that start `offset`
// bytes behind each pointer. `out` may be one of `ins`; n >= 1. Halves: in float32, rounded once;
// kAverage is the sum times `scale`.
using ReduceLoop = void (*)(void* out, const void* const* ins, int n, int64_t offset, int64_t count,
                            float scale);

// dst[i] = src[i] * scale in float32 (float64 of float64), rounded once more. `dst` may be `src`.
// `counts`, where not null, is added to in the same pass. `stream`: see Stores.
using ConvertLoop = void (*)(void* dst, const void* src, int64_t count, double scale,
                             ConvertCounts* counts, bool stream);

// All instruction sets give the same bits in IeeeMode, except for which NaN a NaN is.
struct Loops {
  const char* name;                                // "avx2"
  ReduceLoop reduce[kReduceOpCount][kDTypeCount];  // null: the dtype does not have the op
  ConvertLoop convert[kDTypeCount][kDTypeCount];   // [from][to]; null: load, then store
  ConvertLoop copy[kDTypeCount];  // all bits; `scale` means nothing. Null: not floating
  int64_t (*count_non_finite[kDTypeCount])(const void* src, int64_t count);
  // dst[i] = src[i] * scale, and back by cast (floating: one rounding; integers: toward zero,
  // clamped, NaN gives 0).
  void (*load_f32[kDTypeCount])(float* dst, const void* src, int64_t count, float scale);
  void (*load_f64[kDTypeCount])(double* dst, const void* src, int64_t count, double scale);
  void (*store_f32[kDTypeCount])(void* dst, const float* src, int64_t count);
  void (*store_f64[kDTypeCount])(void* dst, const double* src, int64_t count);
};

// What this processor runs, slowest first: one to three.
const std::vector<Loops>& SupportedLoops();
const Loops& BestLoops();

}  // namespace gradred::reduce
