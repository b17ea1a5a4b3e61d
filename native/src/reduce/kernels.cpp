#include "reduce/kernels.h"

#include <cstring>
#include <limits>
#include <type_traits>

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

// The half conversions of base/dtype.h once more, inline, with selects instead of branches, and
// without subnormal floats: frameworks run their threads with "denormals are zero".
inline float Widen(Float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t special = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  const uint32_t subnormal =
      BitCast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  uint32_t u = magnitude < 0x400u ? subnormal : normal;
  u = magnitude >= 0x7c00u ? special : u;
  return BitCast<float>(u | sign);
}
inline float Widen(Bfloat16 h) { return ToFloat(h); }

inline Float16 NarrowTo(Float16, float f) {
  const uint32_t u = BitCast<uint32_t>(f);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;  // rounds beyond 65504
  h = magnitude > 0x7f800000u ? 0x7e00u : h;
  return {static_cast<uint16_t>(sign | h)};
}
inline Bfloat16 NarrowTo(Bfloat16, float f) { return ToBfloat16(f); }

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

// Sums and products of integers wrap: unsigned, and never narrower than int, so that no promotion
// is signed.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;
template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

struct Sum {
  template <class T>
  static T Of(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class T>
  static T Of(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    else
      return a * b;
  }
};
// NaN wins, and of zeros the one that the name says, so that the order of the operands does not
// matter.
struct Min {
  template <class T>
  static T Of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      const T equal = BitCast<T>(BitCast<BitsOf<T>>(a) | BitCast<BitsOf<T>>(b));
      const T other = (a < b) | (a != a) ? a : b;
      return a == b ? equal : other;
    } else
      return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T Of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      const T equal = BitCast<T>(BitCast<BitsOf<T>>(a) & BitCast<BitsOf<T>>(b));
      const T other = (a > b) | (a != a) ? a : b;
      return a == b ? equal : other;
    } else
      return a > b ? a : b;
  }
};
struct And {
  template <class T>
  static T Of(T a, T b) {
    return a & b;
  }
};

// Of bool, by its byte: any byte but 0 is true.
struct Or {
  static uint8_t Of(uint8_t a, uint8_t b) { return (a | b) != 0; }
};
struct All {
  static uint8_t Of(uint8_t a, uint8_t b) { return (a != 0) & (b != 0); }
};

// Toward zero, clamped, NaN gives 0.
template <class T, class F>
inline T ClampTo(F v) {
  constexpr F kLow = static_cast<F>(std::numeric_limits<T>::min());
  if constexpr (sizeof(T) == 8) {
    constexpr F kBeyond = static_cast<F>(0x1p63);  // the largest int64 is not a double
    if (v != v) return 0;
    if (v >= kBeyond) return std::numeric_limits<T>::max();
    return v <= kLow ? std::numeric_limits<T>::min() : static_cast<T>(v);
  } else {
    constexpr F kHigh = static_cast<F>(std::numeric_limits<T>::max());
    v = v == v ? v : F(0);
    v = v < kLow ? kLow : v;
    v = v > kHigh ? kHigh : v;
    return static_cast<T>(static_cast<int32_t>(v));
  }
}

namespace baseline {
#define GRADRED_TARGET
#define GRADRED_LOOPS_NAME "baseline"
#include "reduce/loops.inc"
#undef GRADRED_LOOPS_NAME
#undef GRADRED_TARGET
}  // namespace baseline

#if defined(__x86_64__)
namespace avx2 {
#define GRADRED_TARGET __attribute__((target("avx2,f16c")))
#define GRADRED_F16C
#define GRADRED_LOOPS_NAME "avx2"
#include "reduce/loops.inc"
#undef GRADRED_LOOPS_NAME
#undef GRADRED_TARGET
}  // namespace avx2
namespace avx512 {
#define GRADRED_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")))
#define GRADRED_LOOPS_NAME "avx512"
#include "reduce/loops.inc"
#undef GRADRED_LOOPS_NAME
#undef GRADRED_F16C
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
