#include "nccl_reduce.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

// The upper half of a float: rounds to nearest even.
struct Brain {
  Brain() = default;
  explicit Brain(float f) {
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    bits = static_cast<uint16_t>(f != f ? (u >> 16) | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
  explicit operator float() const {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
  }
  uint16_t bits;
};

template <int kMantissa, int kLowest>
float RoundTo(float f) {
  if (f == 0 || !std::isfinite(f)) return f;
  const int exponent = std::ilogb(f) - kMantissa;
  const int last =
      exponent < kLowest ? kLowest : exponent;  // exponent of the last bit that is kept
  return static_cast<float>(
      std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(f), -last)), last));
}

// IEEE half, from its definition.
struct Half {
  Half() = default;
  explicit Half(float f) {
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    const float a = std::fabs(RoundTo<10, -24>(f));
    if (f != f) {
      bits = 0x7e00;
    } else if (a > 65504) {
      bits = sign | 0x7c00;
    } else if (a < std::ldexp(1.0f, -14)) {
      bits = static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(a, 24)));
    } else {
      const int e = std::ilogb(a);
      bits = static_cast<uint16_t>(sign | (e + 15) << 10 |
                                   (static_cast<uint16_t>(std::ldexp(a, 10 - e)) & 0x3ff));
    }
  }
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
    return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  uint16_t bits;
};

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;

template <class T>
T Apply(int op, T a, T b) {
  if constexpr (kIsHalf<T>) {
    return T(Apply<float>(op, static_cast<float>(a), static_cast<float>(b)));
  } else if constexpr (std::is_floating_point_v<T>) {
    switch (op) {
      case kProd:
        return a * b;
      case kMax:
        return std::fmax(a, b);
      case kMin:
        return std::fmin(a, b);
      default:
        return a + b;
    }
  } else {
    using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;  // wraps
    switch (op) {
      case kProd:
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
      case kMax:
        return a > b ? a : b;
      case kMin:
        return a < b ? a : b;
      default:
        return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    }
  }
}

template <class T>
void Reduce(int op, const void* scalar, const std::vector<const void*>& ins, void* out,
            size_t count) {
  const size_t n = ins.size();
  T factor{};
  bool scaled = scalar != nullptr;
  if (scaled) std::memcpy(&factor, scalar, sizeof factor);
  if (op == kAvg && (kIsHalf<T> || std::is_floating_point_v<T>)) {
    scaled = true;
    factor = T(1.0f / static_cast<float>(n));
  }
  for (size_t i = 0; i < count; ++i) {
    const auto input = [&](size_t k) {
      const T value = static_cast<const T*>(ins[(i / 16 + k) % n])[i];
      return scaled ? Apply<T>(kProd, value, factor) : value;
    };
    T value = input(0);
    for (size_t k = 1; k < n; ++k) value = Apply<T>(op, value, input(k));
    if constexpr (std::is_integral_v<T>) {
      if (op == kAvg) value = static_cast<T>(value / static_cast<T>(n));
    }
    static_cast<T*>(out)[i] = value;
  }
}

}  // namespace

size_t SizeOf(int type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kUint32:
    case kFloat32:
      return 4;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
  }
  return 0;
}

void ReduceInputs(int type, int op, const void* scalar, const std::vector<const void*>& ins,
                  void* out, size_t count) {
  switch (type) {
    case kInt8:
      return Reduce<int8_t>(op, scalar, ins, out, count);
    case kUint8:
      return Reduce<uint8_t>(op, scalar, ins, out, count);
    case kInt32:
      return Reduce<int32_t>(op, scalar, ins, out, count);
    case kUint32:
      return Reduce<uint32_t>(op, scalar, ins, out, count);
    case kInt64:
      return Reduce<int64_t>(op, scalar, ins, out, count);
    case kUint64:
      return Reduce<uint64_t>(op, scalar, ins, out, count);
    case kFloat16:
      return Reduce<Half>(op, scalar, ins, out, count);
    case kFloat32:
      return Reduce<float>(op, scalar, ins, out, count);
    case kFloat64:
      return Reduce<double>(op, scalar, ins, out, count);
    case kBfloat16:
      return Reduce<Brain>(op, scalar, ins, out, count);
  }
}
