#include "reduce/kernels.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The iterations are independent even when an output is an input: equal indices only. Without
// saying so, the compilers' test for overlap sends exactly that case to the scalar loop.
#if defined(__clang__)
#define GRADRED_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GRADRED_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace gradred::reduce {
namespace {

template <class To, class From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A double as a float rounded to odd: rounding that once more to a half is as good as rounding the
// double once.
inline float RoundToOdd(double d) {
  const float nearest = static_cast<float>(d);
  const double back = nearest;
  uint32_t u = BitCast<uint32_t>(nearest);
  u -= (back < 0 ? -back : back) > (d < 0 ? -d : d);  // toward zero
  u |= back != d;
  return BitCast<float>(u);
}

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

// Toward zero, clamped, NaN gives 0.
template <class T, class F>
inline T ClampTo(F v) {
  constexpr F kLow = static_cast<F>(std::numeric_limits<T>::min());
  if constexpr (sizeof(T) == 8) {
    // The largest integers of 64 bits are no doubles.
    constexpr F kBeyond = static_cast<F>(std::is_signed_v<T> ? 0x1p63 : 0x1p64);
    if (v != v) return 0;
    if (v >= kBeyond) return std::numeric_limits<T>::max();
    return v <= kLow ? std::numeric_limits<T>::min() : static_cast<T>(v);
  } else {
    constexpr F kHigh = static_cast<F>(std::numeric_limits<T>::max());
    v = v == v ? v : F(0);
    v = v < kLow ? kLow : v;
    v = v > kHigh ? kHigh : v;
    using Wide = std::conditional_t<std::is_same_v<T, uint32_t>, int64_t, int32_t>;
    return static_cast<T>(static_cast<Wide>(v));
  }
}

namespace baseline {
#define GRADRED_TARGET
#define GRADRED_LOOPS_NAME "baseline"
#define GRADRED_VECTOR_NBYTES 16
#include "reduce/loops.inc"
#undef GRADRED_VECTOR_NBYTES
#undef GRADRED_LOOPS_NAME
#undef GRADRED_TARGET
}  // namespace baseline

#if defined(__x86_64__)
namespace avx2 {
#define GRADRED_TARGET __attribute__((target("avx2,f16c")))
#define GRADRED_LOOPS_NAME "avx2"
#define GRADRED_VECTOR_NBYTES 32
#include "reduce/loops.inc"
#undef GRADRED_VECTOR_NBYTES
#undef GRADRED_LOOPS_NAME
#undef GRADRED_TARGET
}  // namespace avx2
namespace avx512 {
#define GRADRED_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))
#define GRADRED_LOOPS_NAME "avx512"
#define GRADRED_VECTOR_NBYTES 64
#include "reduce/loops.inc"
#undef GRADRED_VECTOR_NBYTES
#undef GRADRED_LOOPS_NAME
#undef GRADRED_TARGET
}  // namespace avx512
#endif

}  // namespace

const std::vector<Loops>& SupportedLoops() {
  static const std::vector<Loops> supported = [] {
    std::vector<Loops> loops = {baseline::kLoops};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (has_avx2) loops.push_back(avx2::kLoops);
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      loops.push_back(avx512::kLoops);
#endif
    return loops;
  }();
  return supported;
}

const Loops& BestLoops() {
  static const Loops& best = SupportedLoops().back();
  return best;
}

}  // namespace gradred::reduce
