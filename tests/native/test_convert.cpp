// Conversions of all pairs of dtypes, their counts, and averages of integers that never wrap.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/dtype.h"
#include "base/status.h"
#include "reduce/convert.h"
#include "reduce/kernels.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::reduce;

namespace {

constexpr uint32_t kSeed = 90210;

template <class T>
T Get(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void Put(void* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

// The element as F, rounded at most once.
template <class F>
F ValueOf(DType d, const uint8_t* p) {
  switch (d) {
    case DType::kBool:
      return *p != 0;
    case DType::kUint8:
      return *p;
    case DType::kUint16:
      return Get<uint16_t>(p);
    case DType::kUint32:
      return static_cast<F>(Get<uint32_t>(p));
    case DType::kUint64:
      return static_cast<F>(Get<uint64_t>(p));
    case DType::kInt8:
      return Get<int8_t>(p);
    case DType::kInt16:
      return Get<int16_t>(p);
    case DType::kInt32:
      return static_cast<F>(Get<int32_t>(p));
    case DType::kInt64:
      return static_cast<F>(Get<int64_t>(p));
    case DType::kFloat16:
      return ToFloat(Float16{Get<uint16_t>(p)});
    case DType::kBfloat16:
      return ToFloat(Bfloat16{Get<uint16_t>(p)});
    case DType::kFloat32:
      return Get<float>(p);
    default:
      return static_cast<F>(Get<double>(p));
  }
}

// Nearest half of a double with one rounding: of the two halves around it, found from the float's
// side by exact differences.
uint16_t HalfOf(DType d, double x) {
  const auto value = [&](uint16_t bits) -> double {
    return d == DType::kFloat16 ? ToFloat(Float16{bits}) : ToFloat(Bfloat16{bits});
  };
  const float f = static_cast<float>(x);
  const uint16_t guess = d == DType::kFloat16 ? ToFloat16(f).bits : ToBfloat16(f).bits;
  if (x != x || std::isinf(x) || (guess & 0x7fff) == 0) return guess;
  const uint16_t infinity = d == DType::kFloat16 ? 0x7c00 : 0x7f80;
  // The double rounding by way of float errs only at ties, by one step.
  uint16_t best = guess;
  if ((guess & 0x7fff) == infinity) {
    const double last = value(infinity - 1), step = last - value(infinity - 2);
    return std::fabs(x) >= last + step / 2 ? guess : static_cast<uint16_t>(guess - 1);
  }
  for (int delta : {-1, 1}) {
    const uint16_t other = static_cast<uint16_t>(guess + delta);
    if ((other & 0x7fff) >= infinity) continue;
    const double now = std::fabs(value(best) - x), then = std::fabs(value(other) - x);
    if (then < now || (then == now && other % 2 == 0)) best = other;
  }
  return best;
}

template <class T, class F>
T Clamped(F v) {
  if (v != v) return 0;
  if (static_cast<long double>(v) >= static_cast<long double>(std::numeric_limits<T>::max()))
    return std::numeric_limits<T>::max();
  if (static_cast<long double>(v) <= static_cast<long double>(std::numeric_limits<T>::min()))
    return std::numeric_limits<T>::min();
  return static_cast<T>(v);
}

template <class F>
void StoreAs(DType d, uint8_t* p, F v) {
  switch (d) {
    case DType::kBool:
      *p = v != 0;
      return;
    case DType::kUint8:
      return Put(p, Clamped<uint8_t>(v));
    case DType::kUint16:
      return Put(p, Clamped<uint16_t>(v));
    case DType::kUint32:
      return Put(p, Clamped<uint32_t>(v));
    case DType::kUint64:
      return Put(p, Clamped<uint64_t>(v));
    case DType::kInt8:
      return Put(p, Clamped<int8_t>(v));
    case DType::kInt16:
      return Put(p, Clamped<int16_t>(v));
    case DType::kInt32:
      return Put(p, Clamped<int32_t>(v));
    case DType::kInt64:
      return Put(p, Clamped<int64_t>(v));
    case DType::kFloat16:
    case DType::kBfloat16:
      return Put(p, HalfOf(d, v));
    case DType::kFloat32:
      return Put(p, static_cast<float>(v));
    default:
      return Put(p, static_cast<double>(v));
  }
}

bool InDouble(DType d) { return d == DType::kFloat64 || (IsInteger(d) && DTypeSize(d) >= 4); }

bool Finite(DType d, const uint8_t* p) {
  return !IsFloating(d) || std::isfinite(ValueOf<double>(d, p));
}

void FillElement(DType d, std::mt19937& random, uint8_t* p) {
  static const double kSpecial[] = {
      0.0,     -0.0,    0.5,     -0.99,   INFINITY, -INFINITY,    NAN,       127.5, -128.5,
      32768.0, 65504.0, 65519.0, 65520.0, 1e-7,     3e-8,         1e39,      2.5e9, -9.3e18,
      9.3e18,  1e300,   256.0,   -1.0,    1.0,      1.0009765626, 1.00390626};
  for (int i = 0; i < DTypeSize(d); ++i) p[i] = static_cast<uint8_t>(random());
  if (d == DType::kBool) *p &= 1;
  if (IsFloating(d) && random() % 2)
    StoreAs<double>(d, p, kSpecial[random() % (sizeof kSpecial / 8)]);
}

}  // namespace

TEST(EveryPairOfDtypes) {
  std::mt19937 random(kSeed);
  for (int from = 0; from < kDTypeCount; ++from)
    for (int to = 0; to < kDTypeCount; ++to)
      for (double scale : {1.0, 0.5, 1.0 / 3, -3.0, 1e6})
        for (int64_t count : {0, 1, 17, 2051}) {
          const DType s = static_cast<DType>(from), d = static_cast<DType>(to);
          const size_t s_size = static_cast<size_t>(DTypeSize(s)),
                       d_size = static_cast<size_t>(DTypeSize(d));
          const size_t n = static_cast<size_t>(count);
          std::vector<uint8_t> src(n * s_size + 1), dst((n + 1) * d_size, 0xcd);
          for (size_t i = 0; i < n; ++i) FillElement(s, random, &src[i * s_size]);
          ConvertCounts counts{5, 7};
          Convert(dst.data(), d, src.data(), s, count, scale, &counts);
          ConvertCounts expected_counts{5, 7};
          for (size_t i = 0; i < n; ++i) {
            const uint8_t* in = &src[i * s_size];
            uint8_t expected[8];
            if (s == d && scale == 1)
              std::memcpy(expected, in, d_size);
            else if (InDouble(s) || InDouble(d))
              StoreAs<double>(d, expected, ValueOf<double>(s, in) * scale);
            else
              StoreAs<float>(d, expected, ValueOf<float>(s, in) * static_cast<float>(scale));
            const bool both_nan = IsFloating(d) && std::isnan(ValueOf<double>(d, expected)) &&
                                  std::isnan(ValueOf<double>(d, &dst[i * d_size]));
            testing::Check(both_nan || std::memcmp(expected, &dst[i * d_size], d_size) == 0,
                           std::string(DTypeName(s)) + " to " + DTypeName(d) + " of " +
                               std::to_string(ValueOf<double>(s, in)) + " times " +
                               std::to_string(scale) + ": got " +
                               std::to_string(ValueOf<double>(d, &dst[i * d_size])) + " expected " +
                               std::to_string(ValueOf<double>(d, expected)),
                           __FILE__, __LINE__);
            if (!IsFloating(d)) continue;
            expected_counts.non_finite += !Finite(s, in);
            expected_counts.saturated += Finite(s, in) && !Finite(d, expected);
          }
          for (size_t i = 0; i < d_size; ++i) CHECK_EQ(int(dst[n * d_size + i]), 0xcd);
          CHECK_EQ(counts.non_finite, expected_counts.non_finite);
          CHECK_EQ(counts.saturated, expected_counts.saturated);
          if (s_size == d_size) {  // in place, counted alike
            ConvertCounts again{5, 7};
            Convert(src.data(), d, src.data(), s, count, scale, &again);
            CHECK(std::memcmp(src.data(), dst.data(), n * d_size) == 0);
            CHECK_EQ(again.non_finite, counts.non_finite);
            CHECK_EQ(again.saturated, counts.saturated);
          }
        }
}

TEST(AllInstructionSetsConvertAlike) {
  std::mt19937 random(kSeed + 1);
  constexpr int64_t kCount = 4099;
  const Loops& baseline = SupportedLoops()[0];
  for (const Loops& loops : SupportedLoops())
    for (int di = 0; di < kDTypeCount; ++di) {
      const DType d = static_cast<DType>(di);
      std::vector<uint8_t> src(kCount * 8);
      for (int64_t i = 0; i < kCount; ++i)
        FillElement(d, random, &src[static_cast<size_t>(i * DTypeSize(d))]);
      std::vector<float> a(kCount), b(kCount);
      std::vector<double> x(kCount), y(kCount);
      loops.load_f32[di](a.data(), src.data(), kCount, 0.3f);
      baseline.load_f32[di](b.data(), src.data(), kCount, 0.3f);
      loops.load_f64[di](x.data(), src.data(), kCount, 0.3);
      baseline.load_f64[di](y.data(), src.data(), kCount, 0.3);
      for (size_t i = 0; i < kCount; ++i) {
        CHECK(a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]));
        CHECK(x[i] == y[i] || (x[i] != x[i] && y[i] != y[i]));
      }
      if (loops.count_non_finite[di])
        CHECK_EQ(loops.count_non_finite[di](src.data(), kCount),
                 baseline.count_non_finite[di](src.data(), kCount));
    }
}

// Any count, alignment and share of values that are not finite, on every instruction set, in place
// too.
TEST(FuzzConversionsAgainstTheReference) {
  std::mt19937 random(kSeed + 2);
  constexpr size_t kGuard = 64;
  for (const Loops& loops : SupportedLoops())
    for (int trial = 0; trial < 1500; ++trial) {
      static const DType kFloating[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32,
                                        DType::kFloat64};
      const bool copy = random() % 4 == 0;
      const DType s = kFloating[random() % 4], d = copy ? s : kFloating[random() % 4];
      const ConvertLoop loop = loops.convert[static_cast<int>(s)][static_cast<int>(d)];
      if (!copy && !loop) continue;
      const size_t s_size = static_cast<size_t>(DTypeSize(s)),
                   d_size = static_cast<size_t>(DTypeSize(d));
      const size_t n = random() % (random() % 2 ? 70 : 700);
      const size_t shift = random() % 33;  // elements
      static const double kScales[] = {1, 0.25, 1.0 / 3, -3, 1e6, 1e-30, INFINITY};
      const double scale = copy ? 1 : kScales[random() % 7];
      const unsigned specials = random() % 3;  // none, few, many
      std::vector<uint8_t> src((shift + n) * s_size + kGuard, 0xcd);
      uint8_t* const in = &src[shift * s_size];
      for (size_t i = 0; i < n; ++i) {
        if (specials == 2 || (specials == 1 && random() % 100 == 0))
          FillElement(s, random, in + i * s_size);
        else
          StoreAs<double>(s, in + i * s_size, static_cast<double>(random() % 2000) / 64 - 15);
      }
      std::vector<uint8_t> expected(n * d_size);
      ConvertCounts expected_counts{3, 4};
      for (size_t i = 0; i < n; ++i) {
        uint8_t* const out = &expected[i * d_size];
        if (copy)
          std::memcpy(out, in + i * s_size, s_size);
        else if (s == DType::kFloat64)
          StoreAs<double>(d, out, ValueOf<double>(s, in + i * s_size) * scale);
        else
          StoreAs<float>(d, out, ValueOf<float>(s, in + i * s_size) * static_cast<float>(scale));
        const bool finite = Finite(s, in + i * s_size);
        expected_counts.non_finite += !finite;
        expected_counts.saturated += finite && !Finite(d, out);
      }
      const bool in_place = s_size == d_size && random() % 2;
      const bool counted = random() % 2;
      std::vector<uint8_t> separate((shift + n) * d_size + kGuard, 0xcd);
      std::vector<uint8_t>& dst = in_place ? src : separate;
      uint8_t* const out = &dst[shift * d_size];
      ConvertCounts counts{3, 4};
      (copy ? loops.copy[static_cast<int>(s)] : loop)(out, in, static_cast<int64_t>(n), scale,
                                                      counted ? &counts : nullptr, random() % 2);
      const std::string what = std::string(loops.name) + " " + DTypeName(s) + " to " +
                               DTypeName(d) + ", " + std::to_string(n) + " times " +
                               std::to_string(scale) + ", seed " + std::to_string(kSeed + 2) +
                               ", trial " + std::to_string(trial);
      for (size_t i = 0; i < n; ++i) {
        const bool both_nan = std::isnan(ValueOf<double>(d, &expected[i * d_size])) &&
                              std::isnan(ValueOf<double>(d, out + i * d_size));
        testing::Check((both_nan && !copy) ||
                           std::memcmp(out + i * d_size, &expected[i * d_size], d_size) == 0,
                       what + ": element " + std::to_string(i), __FILE__, __LINE__);
      }
      for (size_t i = 0; i < shift * d_size; ++i) CHECK_EQ(int(dst[i]), 0xcd);
      for (size_t i = 0; i < kGuard; ++i) CHECK_EQ(int(out[n * d_size + i]), 0xcd);
      if (!counted) continue;
      testing::CheckEq(counts.non_finite, expected_counts.non_finite, what.c_str(), __FILE__,
                       __LINE__);
      testing::CheckEq(counts.saturated, expected_counts.saturated, what.c_str(), __FILE__,
                       __LINE__);
    }
}

#if defined(__x86_64__)
TEST(TheThreadsModeDoesNotMatter) {
  const float in[] = {1e-40f, -3e-42f, 1.5e-38f, 1e-45f};
  float expected[4], out[4];
  uint16_t expected_half[4], half[4];
  Convert(expected, DType::kFloat32, in, DType::kFloat32, 4, 0.5, nullptr);
  Convert(expected_half, DType::kBfloat16, in, DType::kFloat32, 4, 1, nullptr);
  CHECK(expected[0] != 0 && expected_half[0] != 0);
  const unsigned mode = _mm_getcsr();
  constexpr unsigned kFlush = 0x8040, kUp = 0x4000;
  _mm_setcsr(mode | kFlush | kUp);
  Convert(out, DType::kFloat32, in, DType::kFloat32, 4, 0.5, nullptr);
  Convert(half, DType::kBfloat16, in, DType::kFloat32, 4, 1, nullptr);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(mode);
  CHECK_EQ(after & (kFlush | kUp), kFlush | kUp);
  CHECK(std::memcmp(out, expected, sizeof out) == 0);
  CHECK(std::memcmp(half, expected_half, sizeof half) == 0);
}
#endif

TEST(DoubleToHalfRoundsOnce) {
  // Just above a tie by less than a float's precision: by way of float the tie would go to even,
  // downwards.
  const double above_tie = 1.0 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  const double below_tie = 1.0 + 3 * std::ldexp(1.0, -11) - std::ldexp(1.0, -40);
  const double in[] = {above_tie, below_tie, -above_tie, 65520.0 - 1e-9, 65520.0};
  uint16_t out[5];
  ConvertCounts counts;
  Convert(out, DType::kFloat16, in, DType::kFloat64, 5, 1.0, &counts);
  CHECK_EQ(out[0], 0x3c01);
  CHECK_EQ(out[1], 0x3c01);
  CHECK_EQ(out[2], 0xbc01);
  CHECK_EQ(out[3], 0x7bff);
  CHECK_EQ(out[4], 0x7c00);
  CHECK_EQ(counts.saturated, 1);
  CHECK_EQ(counts.non_finite, 0);
}

TEST(IntegerAveragesNeverWrap) {
  const int8_t small[] = {100, -128, 7, -7};
  int64_t sums[4] = {};
  for (int rank = 0; rank < 2; ++rank) {
    int64_t wide[4];
    Convert(wide, DType::kInt64, small, DType::kInt8, 4, 1.0, nullptr);
    for (int i = 0; i < 4; ++i) sums[i] += wide[i];
  }
  sums[2] += 1, sums[3] -= 1;  // means of 7.5 and -7.5
  int8_t mean[4];
  UnpackIntegerAverage(mean, DType::kInt8, sums, 4, 2);
  CHECK_EQ(int(mean[0]), 100);
  CHECK_EQ(int(mean[1]), -128);
  CHECK_EQ(int(mean[2]), 7);
  CHECK_EQ(int(mean[3]), -7);
  const int64_t bools[] = {2, 1, 0};
  uint8_t all[3];
  UnpackIntegerAverage(all, DType::kBool, bools, 3, 2);
  CHECK_EQ(int(all[0]), 1);
  CHECK_EQ(int(all[1]), 0);
  CHECK_EQ(int(all[2]), 0);
  CHECK_ERROR(UnpackIntegerAverage(all, DType::kFloat32, bools, 1, 2), Kind::kInternal, "float32");
}

TEST(Uint64AveragesAreExact) {
  std::mt19937_64 random(kSeed);
  for (int size : {1, 2, 3, 27648}) {
    uint64_t packed[8] = {};  // as the sums of int64 are made
    unsigned __int128 exact[4] = {};
    for (int rank = 0; rank < size; ++rank) {
      const uint64_t values[4] = {UINT64_MAX, random(), random() % 7, rank == 0 ? 1u : 0u};
      int64_t mine[8];
      PackInt64Average(mine, values, 4, size);
      for (int i = 0; i < 8; ++i) packed[i] += static_cast<uint64_t>(mine[i]);
      for (int i = 0; i < 4; ++i) exact[i] += values[i];
    }
    int64_t sums[8];
    std::memcpy(sums, packed, sizeof sums);
    uint64_t mean[4];
    UnpackInt64Average(mean, sums, 4, size);
    for (int i = 0; i < 4; ++i)
      CHECK_EQ(mean[i], static_cast<uint64_t>(exact[i] / static_cast<unsigned>(size)));
  }
}

TEST(Int64AveragesAreExact) {
  std::mt19937_64 random(kSeed);
  for (int size : {1, 2, 3, 5, 8, 27648}) {
    const int ranks = size;
    for (int pattern = 0; pattern < 6; ++pattern) {
      constexpr int64_t kCount = 5;
      int64_t packed[2 * kCount] = {};
      __int128 exact[kCount] = {};
      for (int rank = 0; rank < ranks; ++rank) {
        int64_t values[kCount], mine[2 * kCount];
        for (int64_t& v : values) {
          v = static_cast<int64_t>(random());
          if (pattern == 1) v = INT64_MAX;
          if (pattern == 2) v = INT64_MIN;
          if (pattern == 3) v = rank % 2 ? INT64_MIN : INT64_MAX;
          if (pattern == 4) v = static_cast<int64_t>(random() % 7) - 3;
          if (pattern == 5) v = rank == 0 ? 1 : -1;
        }
        PackInt64Average(mine, values, kCount, size);
        for (int i = 0; i < 2 * kCount; ++i) {
          int64_t sum;
          CHECK(!__builtin_add_overflow(packed[i], mine[i], &sum));
          packed[i] = sum;
        }
        for (int i = 0; i < kCount; ++i) exact[i] += values[i];
      }
      int64_t mean[kCount];
      UnpackInt64Average(mean, packed, kCount, size);
      for (int i = 0; i < kCount; ++i) CHECK_EQ(mean[i], static_cast<int64_t>(exact[i] / size));
      for (int64_t begin : {0, 1, 3})  // any range by itself
        for (int64_t end = begin; end <= kCount; ++end) {
          int64_t part[kCount];
          UnpackInt64Average(part, packed + 2 * begin, end - begin, size);
          for (int64_t i = begin; i < end; ++i) CHECK_EQ(part[i - begin], mean[i]);
        }
    }
  }
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
