#include "reduce/convert.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/status.h"
#include "reduce/float_mode.h"
#include "reduce/kernels.h"

namespace gradred::reduce {
namespace {

bool NeedsDouble(DType d) { return d == DType::kFloat64 || (IsInteger(d) && DTypeSize(d) >= 4); }

// By way of F, float or double, block by block in the nearest cache.
struct Stages {
  const Loops& loops;
  char* dst;
  const char* src;
  int to, from;

  template <class F, class Load, class Store>
  void Run(Load load, Store store, int64_t count, F scale, ConvertCounts* counts) const {
    constexpr int64_t kBlock = 1024;
    const int to_size = DTypeSize(static_cast<DType>(to));
    const int from_size = DTypeSize(static_cast<DType>(from));
    F block[kBlock];
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t m = std::min(kBlock, count - at);
      const char* const in = src + at * from_size;
      char* const out = dst + at * to_size;
      int64_t non_finite = 0;  // integers are finite
      if (counts && loops.count_non_finite[from]) non_finite = loops.count_non_finite[from](in, m);
      load(block, in, m, scale);
      store(out, block, m);
      if (!counts) continue;
      counts->non_finite += non_finite;
      counts->saturated += loops.count_non_finite[to](out, m) - non_finite;
    }
  }
};

template <class T>
void DivideSums(T* dst, const int64_t* sums, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    dst[i] = static_cast<T>(std::clamp(sums[i] / size, low, high));
  }
}

}  // namespace

void Convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, int64_t count,
             double scale, ConvertCounts* counts, Stores stores) {
  const IeeeMode ieee_mode;
  const Loops& loops = BestLoops();
  const int to = static_cast<int>(dst_dtype), from = static_cast<int>(src_dtype);
  const bool stream = stores == Stores::kStreamed;
  if (!IsFloating(dst_dtype)) counts = nullptr;
  if (scale == 1 && dst_dtype == src_dtype) {
    if (counts || (stream && loops.copy[to]))
      loops.copy[to](dst, src, count, scale, counts, stream);
    else if (dst != src)
      std::memcpy(dst, src, static_cast<size_t>(count * DTypeSize(dst_dtype)));
  } else if (loops.convert[from][to]) {
    loops.convert[from][to](dst, src, count, scale, counts, stream);
  } else {
    const Stages stages{loops, static_cast<char*>(dst), static_cast<const char*>(src), to, from};
    if (NeedsDouble(dst_dtype) || NeedsDouble(src_dtype))
      stages.Run(loops.load_f64[from], loops.store_f64[to], count, scale, counts);
    else
      stages.Run(loops.load_f32[from], loops.store_f32[to], count, static_cast<float>(scale),
                 counts);
  }
}

void PackInt64Average(int64_t* dst, const int64_t* src, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i) {
    dst[2 * i] = src[i] / size;
    dst[2 * i + 1] = src[i] % size;
  }
}

void PackInt64Average(int64_t* dst, const uint64_t* src, int64_t count, int size) {
  const uint64_t n = static_cast<uint64_t>(size);
  for (int64_t i = 0; i < count; ++i) {
    dst[2 * i] = static_cast<int64_t>(src[i] / n);
    dst[2 * i + 1] = static_cast<int64_t>(src[i] % n);
  }
}

void UnpackInt64Average(uint64_t* dst, const int64_t* src, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i)  // sums of int64 wrap as those of uint64 would
    dst[i] = static_cast<uint64_t>(src[2 * i]) + static_cast<uint64_t>(src[2 * i + 1] / size);
}

void UnpackInt64Average(int64_t* dst, const int64_t* src, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i) {
    // |remainders| < size * size, so neither the sum of quotients nor this one leaves the range.
    // The whole is quotients + remainders / size; toward zero, so a rest of the other sign than the
    // quotients takes one away.
    int64_t whole = src[2 * i] + src[2 * i + 1] / size;
    const int64_t rest = src[2 * i + 1] % size;
    if (whole > 0 && rest < 0) --whole;
    if (whole < 0 && rest > 0) ++whole;
    dst[i] = whole;
  }
}

void UnpackIntegerAverage(void* dst, DType dst_dtype, const int64_t* sums, int64_t count,
                          int size) {
  switch (dst_dtype) {
    case DType::kBool:
      for (int64_t i = 0; i < count; ++i) static_cast<uint8_t*>(dst)[i] = sums[i] / size != 0;
      return;
    case DType::kUint8:
      return DivideSums(static_cast<uint8_t*>(dst), sums, count, size);
    case DType::kUint16:
      return DivideSums(static_cast<uint16_t*>(dst), sums, count, size);
    case DType::kUint32:
      return DivideSums(static_cast<uint32_t*>(dst), sums, count, size);
    case DType::kInt8:
      return DivideSums(static_cast<int8_t*>(dst), sums, count, size);
    case DType::kInt16:
      return DivideSums(static_cast<int16_t*>(dst), sums, count, size);
    case DType::kInt32:
      return DivideSums(static_cast<int32_t*>(dst), sums, count, size);
    case DType::kInt64:
      return DivideSums(static_cast<int64_t*>(dst), sums, count, size);
    default:
      throw Error(Kind::kInternal,
                  std::string("UnpackIntegerAverage: expected an integer dtype or bool, got ") +
                      DTypeName(dst_dtype));
  }
}

}  // namespace gradred::reduce
