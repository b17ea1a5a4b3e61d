// Into the fusion buffer and out of it: cast and scale between a tensor's dtype and the wire's.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace gradred::reduce {

struct ConvertCounts {
  int64_t non_finite = 0;  // elements of the source that are infinite or NaN
  int64_t saturated = 0;   // finite elements of the source that became infinite in the destination
};

// kStreamed: past the caches, for a destination that they would not keep until it is read.
// Unpacking 256 KiB at a time from the cache into 128 MB: 55 GB/s read and written, 27 with
// kCached; copying 128 MB: 31 and 20 (one core of an EPYC 9004).
enum class Stores { kCached, kStreamed };
constexpr int64_t kStreamedNbytes = int64_t{32} << 20;
// For a destination that is one of `nbytes` written together, by one range or by many.
inline Stores StoresFor(int64_t nbytes) {
  return nbytes >= kStreamedNbytes ? Stores::kStreamed : Stores::kCached;
}

// dst[i] = cast(src[i] * scale). Scaling is done in float64 when either side is float64 or an
// integer wider than 16 bits, else in float32; with scale == 1 and equal dtypes it is a copy. Float
// to integer rounds toward zero and clamps to the range (NaN gives 0). Integer to a narrower
// integer clamps. bool converts as 0 and 1. `dst` may equal `src` when the sizes agree. `counts`,
// where not null, is added to, for floating dst only. `stores` is a hint.
void Convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, int64_t count,
             double scale, ConvertCounts* counts, Stores stores = Stores::kCached);

// Averages of integers never wrap: bool and integers up to 32 bits travel as int64 sums (Convert
// both ways, with the division here); int64 and uint64 travel as quotient and remainder by `size`,
// element i's as the int64 values 2i and 2i + 1 (of uint64: their bits), so that every range of
// pairs is packed and unpacked by itself.
void PackInt64Average(int64_t* dst, const int64_t* src, int64_t count, int size);
void PackInt64Average(int64_t* dst, const uint64_t* src, int64_t count, int size);
// mean = sum of quotients + (sum of remainders) / size, rounded toward zero. `src`: `count` pairs.
void UnpackInt64Average(int64_t* dst, const int64_t* src, int64_t count, int size);
void UnpackInt64Average(uint64_t* dst, const int64_t* src, int64_t count, int size);
// dst[i] = sums[i] / size, rounded toward zero, cast to an integer dtype.
void UnpackIntegerAverage(void* dst, DType dst_dtype, const int64_t* sums, int64_t count, int size);

}  // namespace gradred::reduce
