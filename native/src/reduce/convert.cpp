#include "reduce/convert.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/status.h"
#include "reduce/kernels.h"

namespace gradred::reduce {
namespace {

bool NeedsDouble(DType d) {
  return d == DType::kFloat64 || d == DType::kInt32 || d == DType::kInt64;
}

template <class F, class Load, class Store>
void ConvertBlocks(char* dst, int dst_size, const char* src, int src_size, int64_t count, F scale,
                   Load load, Store store) {
  F block[kLoopBlock];
  for (int64_t at = 0; at < count; at += kLoopBlock) {
    const int64_t m = std::min(kLoopBlock, count - at);
    load(block, src + at * src_size, m, scale);
    store(dst + at * dst_size, block, m);
  }
}

template <class T>
void DivideSums(T* dst, const int64_t* sums, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    dst[i] = static_cast<T>(std::clamp(sums[i] / size, low, high));
  }
}

}  // namespace

void Convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, int64_t count,
             double scale, ConvertCounts* counts) {
  const Loops& loops = BestLoops();
  const int to = static_cast<int>(dst_dtype), from = static_cast<int>(src_dtype);
  const int to_size = DTypeSize(dst_dtype), from_size = DTypeSize(src_dtype);
  char* const out = static_cast<char*>(dst);
  const char* const in = static_cast<const char*>(src);
  int64_t non_finite = 0;
  if (counts && loops.count_non_finite[from] && loops.count_non_finite[to])
    non_finite = loops.count_non_finite[from](src, count);  // before `dst` overwrites it

  if (scale == 1 && dst_dtype == src_dtype) {
    if (dst != src) std::memcpy(dst, src, static_cast<size_t>(count * to_size));
  } else if (NeedsDouble(dst_dtype) || NeedsDouble(src_dtype)) {
    ConvertBlocks<double>(out, to_size, in, from_size, count, scale, loops.load_f64[from],
                          loops.store_f64[to]);
  } else {
    ConvertBlocks<float>(out, to_size, in, from_size, count, static_cast<float>(scale),
                         loops.load_f32[from], loops.store_f32[to]);
  }

  if (counts && loops.count_non_finite[to]) {
    counts->non_finite += non_finite;
    // What is not finite in the source is not finite in the destination; the rest of those there
    // became infinite.
    counts->saturated += loops.count_non_finite[to](dst, count) - non_finite;
  }
}

void PackInt64Average(int64_t* dst, const int64_t* src, int64_t count, int size) {
  for (int64_t i = 0; i < count; ++i) {
    dst[2 * i] = src[i] / size;
    dst[2 * i + 1] = src[i] % size;
  }
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
