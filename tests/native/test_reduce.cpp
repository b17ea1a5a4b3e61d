// Layout against naive references: every dtype and operation, every instruction set, ranges that
// cut sections.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "reduce/kernels.h"
#include "reduce/layout.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::reduce;

namespace {

constexpr uint32_t kSeed = 20117;

// Value of a float16 from its definition.
double HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double BfloatValue(uint16_t bits) {
  const int exponent = bits >> 7 & 255, fraction = bits & 127;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 255) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -133);
  return sign * std::ldexp(128 + fraction, exponent - 134);
}

// Nearest by search in the table of all values, ties to the even pattern; `limit` is where infinity
// begins.
template <double (*Value)(uint16_t)>
uint16_t Nearest(double x, uint16_t infinity) {
  if (x != x) return infinity | 1;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  uint16_t low = 0, high = infinity;  // value(low) <= a < value(high)
  if (std::isinf(a)) return sign | infinity;
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (Value(middle) <= a ? low : high) = middle;
  }
  // What would come after the largest finite value if the exponent went on.
  const double above = high == infinity ? 2 * Value(low) - Value(low - 1) : Value(high);
  const double below = Value(low);
  const bool up = a - below > above - a || (a - below == above - a && low % 2 == 1);
  return sign | (up ? high : low);
}
uint16_t NearestHalf(double x) { return Nearest<HalfValue>(x, 0x7c00); }
uint16_t NearestBfloat(double x) { return Nearest<BfloatValue>(x, 0x7f80); }

bool IsNan(DType d, const uint8_t* p) {
  if (IsHalf(d)) {
    uint16_t u;
    std::memcpy(&u, p, 2);
    return d == DType::kFloat16 ? (u & 0x7fff) > 0x7c00 : (u & 0x7fff) > 0x7f80;
  }
  if (d == DType::kFloat32) {
    float f;
    std::memcpy(&f, p, 4);
    return f != f;
  }
  if (d == DType::kFloat64) {
    double f;
    std::memcpy(&f, p, 8);
    return f != f;
  }
  return false;
}

// Equal bits, or both NaN.
void CheckSame(DType d, const uint8_t* got, const uint8_t* expected, const std::string& what) {
  const size_t size = static_cast<size_t>(DTypeSize(d));
  if (std::memcmp(got, expected, size) == 0 || (IsNan(d, got) && IsNan(d, expected))) return;
  std::string hex = what + ": got";
  char digits[8];
  for (size_t i = 0; i < 2 * size; ++i) {
    if (i == size) hex += " expected";
    std::snprintf(digits, sizeof digits, " %02x", i < size ? got[i] : expected[i - size]);
    hex += digits;
  }
  throw testing::Failure(hex);
}

template <class T>
T Get(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class F>
F FloatOp(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    default:
      break;
  }
  if (a != a) return a;
  if (b != b) return b;
  if (a == 0 && b == 0) {
    const bool negative = op == ReduceOp::kMin ? std::signbit(a) || std::signbit(b)
                                               : std::signbit(a) && std::signbit(b);
    return negative ? F(-0.0) : F(0);
  }
  return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
}

// Integers modulo 2^width by 128-bit arithmetic.
template <class T>
T IntegerOp(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<T>(static_cast<unsigned __int128>(a) + b);
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<unsigned __int128>(a) * b);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    default:
      return static_cast<T>(a & b);
  }
}

template <class T>
void Element(ReduceOp op, const std::vector<const uint8_t*>& ins, uint8_t* out) {
  T value = Get<T>(ins[0]);
  for (size_t k = 1; k < ins.size(); ++k) {
    if constexpr (std::is_floating_point_v<T>)
      value = FloatOp<T>(op, value, Get<T>(ins[k]));
    else
      value = IntegerOp<T>(op, value, Get<T>(ins[k]));
  }
  std::memcpy(out, &value, sizeof value);
}

void Reference(DType d, ReduceOp op, const std::vector<const uint8_t*>& ins, float scale,
               uint8_t* out) {
  switch (d) {
    case DType::kBool: {
      const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
      bool value = !any;
      for (const uint8_t* in : ins) value = any ? value || *in : value && *in;
      *out = value;
      return;
    }
    case DType::kUint8:
      return Element<uint8_t>(op, ins, out);
    case DType::kUint16:
      return Element<uint16_t>(op, ins, out);
    case DType::kUint32:
      return Element<uint32_t>(op, ins, out);
    case DType::kUint64:
      return Element<uint64_t>(op, ins, out);
    case DType::kInt8:
      return Element<int8_t>(op, ins, out);
    case DType::kInt16:
      return Element<int16_t>(op, ins, out);
    case DType::kInt32:
      return Element<int32_t>(op, ins, out);
    case DType::kInt64:
      return Element<int64_t>(op, ins, out);
    case DType::kFloat32:
      return Element<float>(op, ins, out);
    case DType::kFloat64:
      return Element<double>(op, ins, out);
    default:
      break;
  }
  const bool half = d == DType::kFloat16;
  const auto value = [&](const uint8_t* p) {
    return static_cast<float>(half ? HalfValue(Get<uint16_t>(p)) : BfloatValue(Get<uint16_t>(p)));
  };
  float sum = value(ins[0]);
  for (size_t k = 1; k < ins.size(); ++k) sum = FloatOp<float>(op, sum, value(ins[k]));
  if (op == ReduceOp::kAverage) sum *= scale;
  const uint16_t bits = half ? NearestHalf(sum) : NearestBfloat(sum);
  std::memcpy(out, &bits, 2);
}

std::vector<ReduceOp> OpsOf(DType d) {
  std::vector<ReduceOp> ops = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
  if (IsHalf(d)) ops.push_back(ReduceOp::kAverage);
  if (d == DType::kUint8) ops.push_back(ReduceOp::kBitAnd);
  return ops;
}

// Random bit patterns: subnormals, infinities and NaN of the halves are among them; of the wide
// ones they are put in.
void Fill(DType d, std::mt19937& random, uint8_t* p, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; ++i) p[i] = static_cast<uint8_t>(random());
  const int64_t size = DTypeSize(d);
  if (d == DType::kBool)
    for (int64_t i = 0; i < nbytes; ++i) p[i] &= 1;
  for (int64_t i = 0; i + size <= nbytes; i += size) {
    if (random() % 4) continue;
    static const float kSpecial[] = {0.0f,   -0.0f,   INFINITY, -INFINITY, NAN,
                                     1e-42f, -1e-42f, 3e38f,    1.5f};
    const float f = kSpecial[random() % 9];
    const double g = f == 3e38f ? 1.7e308 : f == 1e-42f ? 5e-324 : f;
    if (d == DType::kFloat32) std::memcpy(p + i, &f, 4);
    if (d == DType::kFloat64) std::memcpy(p + i, &g, 8);
  }
}

std::string Name(DType d, ReduceOp op) {
  return std::string(ReduceOpName(op)) + " of " + DTypeName(d);
}

}  // namespace

TEST(EveryLoopAgreesWithTheReference) {
  std::mt19937 random(kSeed);
  for (const Loops& loops : SupportedLoops())
    for (int di = 0; di < kDTypeCount; ++di) {
      const DType d = static_cast<DType>(di);
      const int64_t size = DTypeSize(d);
      for (ReduceOp op : OpsOf(d))
        for (int n : {1, 2, 3, 5})
          for (int64_t count : {0, 1, 7, 33, 1023, 2050}) {
            // Inputs and output are not aligned to more than the element: segments are, but the
            // loops must not care.
            const int64_t offset = size;
            std::vector<std::vector<uint8_t>> data(static_cast<size_t>(n));
            std::vector<const void*> ins;
            for (auto& in : data) {
              in.resize(static_cast<size_t>(offset + count * size));
              Fill(d, random, in.data(), offset + count * size);
              ins.push_back(in.data());
            }
            std::vector<uint8_t> out(static_cast<size_t>(offset + (count + 1) * size), 0xee);
            const auto loop = loops.reduce[static_cast<int>(op)][di];
            const float scale = op == ReduceOp::kAverage ? 0.25f : 1.0f;
            loop(out.data(), ins.data(), n, offset, count, scale);
            std::vector<uint8_t> expected(static_cast<size_t>(count * size));
            for (int64_t i = 0; i < count; ++i) {
              std::vector<const uint8_t*> at;
              for (auto& in : data) at.push_back(in.data() + offset + i * size);
              if (n > 1 || d != DType::kBool)
                Reference(d, op, at, scale, &expected[static_cast<size_t>(i * size)]);
              else
                expected[static_cast<size_t>(i)] = *at[0];
              CheckSame(d, &out[static_cast<size_t>(offset + i * size)],
                        &expected[static_cast<size_t>(i * size)],
                        std::string(loops.name) + " " + Name(d, op) + " n=" + std::to_string(n) +
                            " i=" + std::to_string(i) + " of " + std::to_string(count));
            }
            for (int64_t i = 0; i < size; ++i) {  // nothing before, nothing behind
              CHECK_EQ(int(out[static_cast<size_t>(i)]), 0xee);
              CHECK_EQ(int(out[static_cast<size_t>(offset + count * size + i)]), 0xee);
            }
            for (int alias = 0; alias < n; ++alias) {
              std::vector<uint8_t> copy = data[static_cast<size_t>(alias)];
              loop(data[static_cast<size_t>(alias)].data(), ins.data(), n, offset, count, scale);
              for (int64_t i = 0; i < count; ++i)
                CheckSame(d,
                          &data[static_cast<size_t>(alias)][static_cast<size_t>(offset + i * size)],
                          &expected[static_cast<size_t>(i * size)], "in place, " + Name(d, op));
              std::copy(copy.begin(), copy.end(), data[static_cast<size_t>(alias)].begin());
            }
          }
    }
}

TEST(AllFloat16PatternsWidenAndNarrow) {
  for (const Loops& loops : SupportedLoops()) {
    std::vector<uint16_t> halves(65536), back(65536);
    for (int i = 0; i < 65536; ++i) halves[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
    std::vector<float> floats(65536);
    for (DType d : {DType::kFloat16, DType::kBfloat16}) {
      const int di = static_cast<int>(d);
      loops.load_f32[di](floats.data(), halves.data(), 65536, 1.0f);
      loops.store_f32[di](back.data(), floats.data(), 65536);
      for (int i = 0; i < 65536; ++i) {
        const uint16_t bits = static_cast<uint16_t>(i);
        const float expected =
            static_cast<float>(d == DType::kFloat16 ? HalfValue(bits) : BfloatValue(bits));
        const float got = floats[static_cast<size_t>(i)];
        CheckSame(DType::kFloat32, reinterpret_cast<const uint8_t*>(&got),
                  reinterpret_cast<const uint8_t*>(&expected), std::string(loops.name) + " widens");
        const float scalar =
            d == DType::kFloat16 ? ToFloat(Float16{bits}) : ToFloat(Bfloat16{bits});
        CheckSame(DType::kFloat32, reinterpret_cast<const uint8_t*>(&scalar),
                  reinterpret_cast<const uint8_t*>(&expected), "ToFloat");
        CheckSame(d, reinterpret_cast<const uint8_t*>(&back[static_cast<size_t>(i)]),
                  reinterpret_cast<const uint8_t*>(&bits),
                  std::string(loops.name) + " narrows back");
      }
    }
  }
}

// Any count, alignment and number of inputs, on every instruction set; `out` may be an input.
TEST(FuzzReductionsAgainstTheReference) {
  std::mt19937 random(kSeed + 3);
  constexpr size_t kGuard = 64;
  for (const Loops& loops : SupportedLoops())
    for (int trial = 0; trial < 1500; ++trial) {
      const DType d = static_cast<DType>(random() % kDTypeCount);
      const std::vector<ReduceOp> ops = OpsOf(d);
      const ReduceOp op = ops[random() % ops.size()];
      const size_t size = static_cast<size_t>(DTypeSize(d)), n = 1 + random() % 9;
      const size_t count = random() % (random() % 2 ? 140 : 1200);
      const size_t offset = random() % 70 * size, end = offset + count * size;
      std::vector<std::vector<uint8_t>> data(n, std::vector<uint8_t>(end + kGuard));
      std::vector<const void*> ins;
      for (auto& in : data) {
        Fill(d, random, in.data() + offset, static_cast<int64_t>(count * size));
        ins.push_back(in.data());
      }
      std::vector<uint8_t> expected(count * size);
      for (size_t i = 0; i < count; ++i) {
        std::vector<const uint8_t*> elements;
        for (auto& in : data) elements.push_back(&in[offset + i * size]);
        Reference(d, op, elements, 0.25f, &expected[i * size]);
      }
      std::vector<uint8_t> separate(end + kGuard);
      std::vector<uint8_t>& out = random() % 2 ? separate : data[random() % n];
      std::fill_n(out.begin(), offset, 0xee);
      std::fill_n(out.begin() + static_cast<int64_t>(end), kGuard, 0xee);
      loops.reduce[static_cast<int>(op)][static_cast<int>(d)](
          out.data(), ins.data(), static_cast<int>(n), static_cast<int64_t>(offset),
          static_cast<int64_t>(count), 0.25f);
      for (size_t i = 0; i < count; ++i)
        CheckSame(d, &out[offset + i * size], &expected[i * size],
                  std::string(loops.name) + " " + Name(d, op) + ", " + std::to_string(n) +
                      " inputs of " + std::to_string(count) + ", seed " +
                      std::to_string(kSeed + 3) + ", trial " + std::to_string(trial) +
                      ", element " + std::to_string(i));
      for (size_t i = 0; i < offset; ++i) CHECK_EQ(int(out[i]), 0xee);
      for (size_t i = end; i < end + kGuard; ++i) CHECK_EQ(int(out[i]), 0xee);
    }
}

// Around every half: the value itself, the tie above it, and the floats next to the tie. All signs,
// subnormals, overflow.
TEST(NarrowingRoundsToNearestEven) {
  for (DType d : {DType::kFloat16, DType::kBfloat16}) {
    const bool half = d == DType::kFloat16;
    std::vector<float> floats;
    for (int i = 0; i < (half ? 0x7c00 : 0x7f80); ++i) {
      const uint16_t bits = static_cast<uint16_t>(i);
      const double low = half ? HalfValue(bits) : BfloatValue(bits);
      const uint16_t before = static_cast<uint16_t>(i - 1), after = static_cast<uint16_t>(i + 1);
      const bool last = after == (half ? 0x7c00 : 0x7f80);
      const double high = last ? 2 * low - (half ? HalfValue(before) : BfloatValue(before))
                               : (half ? HalfValue(after) : BfloatValue(after));
      const float tie = static_cast<float>((low + high) / 2);
      for (float f : {static_cast<float>(low), tie, std::nextafter(tie, 0.0f),
                      std::nextafter(tie, INFINITY)}) {
        floats.push_back(f);
        floats.push_back(-f);
      }
    }
    for (float f : {65504.0f, 65519.99f, 65520.0f, 1e38f, 3.4028235e38f, INFINITY, -INFINITY, NAN,
                    1e-45f, 5.9e-8f})
      floats.push_back(f);
    const int64_t n = static_cast<int64_t>(floats.size());
    std::vector<uint16_t> got(floats.size());
    for (const Loops& loops : SupportedLoops()) {
      loops.store_f32[static_cast<int>(d)](got.data(), floats.data(), n);
      for (size_t i = 0; i < floats.size(); ++i) {
        const uint16_t expected = half ? NearestHalf(floats[i]) : NearestBfloat(floats[i]);
        const std::string what =
            std::string(loops.name) + " " + DTypeName(d) + " of " + std::to_string(floats[i]);
        CheckSame(d, reinterpret_cast<const uint8_t*>(&got[i]),
                  reinterpret_cast<const uint8_t*>(&expected), what);
        const uint16_t scalar = half ? ToFloat16(floats[i]).bits : ToBfloat16(floats[i]).bits;
        CheckSame(d, reinterpret_cast<const uint8_t*>(&scalar),
                  reinterpret_cast<const uint8_t*>(&expected), what);
      }
    }
  }
}

TEST(RangesCutSectionsAndGapsStay) {
  std::mt19937 random(kSeed + 1);
  std::vector<Section> sections;
  int64_t at = 0;
  for (int di = 0; di < kDTypeCount; ++di) {
    const DType d = static_cast<DType>(di);
    sections.push_back({at, 100 + 13 * di, d, IsHalf(d) ? ReduceOp::kAverage : ReduceOp::kSum});
    at = AlignUp(at + sections.back().count * DTypeSize(d)) + (di % 3) * kAlign;  // gaps
  }
  sections.push_back({at, 0, DType::kFloat32, ReduceOp::kSum});
  std::vector<Section> shuffled = sections;
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  const Layout layout(shuffled);
  const size_t nbytes = static_cast<size_t>(layout.nbytes());
  constexpr int kInputs = 3;
  std::vector<std::vector<uint8_t>> data(kInputs, std::vector<uint8_t>(nbytes));
  std::vector<const void*> ins;
  for (auto& in : data) {
    for (const Section& s : sections)
      Fill(s.dtype, random, in.data() + s.offset, s.count * DTypeSize(s.dtype));
    ins.push_back(in.data());
  }
  std::vector<uint8_t> expected(nbytes, 0xab);
  layout.ReduceNode(expected.data(), ins.data(), kInputs, {0, layout.nbytes()}, 0.125f);
  std::vector<bool> covered(nbytes, false);
  for (const Section& s : sections)
    for (int64_t i = 0; i < s.count; ++i) {
      const size_t p = static_cast<size_t>(s.offset + i * DTypeSize(s.dtype));
      std::vector<const uint8_t*> elements;
      for (auto& in : data) elements.push_back(in.data() + p);
      uint8_t value[8];
      Reference(s.dtype, s.op, elements, 0.125f, value);
      CheckSame(s.dtype, &expected[p], value, Name(s.dtype, s.op));
      std::fill_n(covered.begin() + static_cast<int64_t>(p), DTypeSize(s.dtype), true);
    }
  for (size_t i = 0; i < nbytes; ++i)
    if (!covered[i]) CHECK_EQ(int(expected[i]), 0xab);
  for (int parts : {1, 2, 3, 7, 1000}) {
    std::vector<uint8_t> out(nbytes, 0xab);
    for (const Range& r : Split(layout.nbytes(), parts))
      layout.ReduceNode(out.data(), ins.data(), kInputs, r, 0.125f);
    CHECK(out == expected);
  }
}

TEST(HopsHalveAverages) {
  const Layout layout({{0, 3, DType::kFloat16, ReduceOp::kAverage},
                       {64, 3, DType::kFloat16, ReduceOp::kSum},
                       {128, 2, DType::kBfloat16, ReduceOp::kAverage}});
  alignas(64) uint16_t a[96] = {}, b[96] = {};
  a[0] = b[0] = ToFloat16(40000).bits;  // the sum would be infinite
  a[1] = b[1] = ToFloat16(1e-7f).bits;  // the half would be gone
  a[2] = ToFloat16(1).bits, b[2] = ToFloat16(2).bits;
  a[32] = b[32] = ToFloat16(40000).bits;
  a[64] = b[64] = ToBfloat16(1e38f).bits;
  layout.ReduceHop(a, a, b, {0, layout.nbytes()});
  CHECK_EQ(a[0], ToFloat16(40000).bits);
  CHECK_EQ(a[1], ToFloat16(1e-7f).bits);
  CHECK_EQ(a[2], ToFloat16(1.5f).bits);
  CHECK_EQ(a[32], 0x7c00);
  CHECK_EQ(a[64], b[64]);
  layout.HopAlone(b, {0, layout.nbytes()});
  CHECK_EQ(b[0], ToFloat16(20000).bits);
  CHECK_EQ(b[32], ToFloat16(40000).bits);
}

TEST(SplitIsEvenAndAligned) {
  for (int64_t nbytes : {0, 1, 64, 65, 640, 6400, 6401})
    for (int parts : {1, 2, 3, 7, 64}) {
      const auto ranges = Split(nbytes, parts);
      CHECK_EQ(static_cast<int>(ranges.size()), parts);
      int64_t at = 0, least = INT64_MAX, most = 0;
      for (const Range& r : ranges) {
        CHECK_EQ(r.begin, at);
        CHECK(r.begin % kAlign == 0 || r.begin == nbytes);
        at = r.end;
        least = std::min(least, r.nbytes()), most = std::max(most, r.nbytes());
      }
      CHECK_EQ(at, nbytes);
      CHECK(most - least <= 2 * kAlign);
    }
}

TEST(BadLayoutsAreNamed) {
  CHECK_ERROR(Layout({{32, 1, DType::kFloat32, ReduceOp::kSum}}), Kind::kInvalidArgument,
              "float32 at byte 32");
  CHECK_ERROR(Layout({{0, -1, DType::kFloat32, ReduceOp::kSum}}), Kind::kInvalidArgument,
              "-1 x float32");
  CHECK_ERROR(Layout({{0, INT64_MAX / 4, DType::kFloat64, ReduceOp::kSum}}), Kind::kInvalidArgument,
              "float64");
  CHECK_ERROR(
      Layout({{64, 8, DType::kInt8, ReduceOp::kSum}, {0, 17, DType::kFloat32, ReduceOp::kSum}}),
      Kind::kInvalidArgument, "overlap");
  CHECK_ERROR(Layout({{0, 1, DType::kFloat32, ReduceOp::kAverage}}), Kind::kInvalidArgument,
              "float32 has no average");
  CHECK_ERROR(Layout({{0, 1, DType::kInt8, ReduceOp::kBitAnd}}), Kind::kInvalidArgument,
              "int8 has no bit-and");
  CHECK_EQ(Layout(std::vector<Section>{}).nbytes(), 0);
  CHECK_EQ(Layout({{64, 1, DType::kInt8, ReduceOp::kSum}}).nbytes(), 128);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
