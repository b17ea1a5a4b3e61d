// Boxes of grid points inside an array in row-major order, and the loops over them.
#pragma once

#include <array>
#include <cstdint>

#include "base/dtype.h"

namespace gradred::diff {

constexpr int kDims = 3;  // arrays of fewer dimensions have leading ones of size 1
using GridShape = std::array<int64_t, kDims>;

inline int64_t Points(const GridShape& shape) { return shape[0] * shape[1] * shape[2]; }

struct Box {
  GridShape begin{}, extent{};
  int64_t points() const { return Points(extent); }
};

// A field on a grid: `outer` arrays, one after the other, of `inner` elements a grid point.
struct FieldType {
  DType dtype = DType::kFloat64;
  int64_t outer = 1, inner = 1;

  int64_t nbytes(int64_t points) const { return outer * points * inner * DTypeSize(dtype); }
};

// The points of `box` in the array of `shape` at `array`, all of `outer`, in row-major order to or
// from `packed`.
void Pack(const FieldType& type, const GridShape& shape, const Box& box, const void* array,
          void* packed);
void Unpack(const FieldType& type, const GridShape& shape, const Box& box, const void* packed,
            void* array);
// array += packed; halves are added in float32 and rounded. `type.dtype` is floating.
void UnpackAdd(const FieldType& type, const GridShape& shape, const Box& box, const void* packed,
               void* array);
// `to` = or += `from`, boxes of one extent that do not overlap, in the same array.
void CopyBox(const FieldType& type, const GridShape& shape, const Box& from, const Box& to,
             void* array);
void AddBox(const FieldType& type, const GridShape& shape, const Box& from, const Box& to,
            void* array);
// Every element of the box = value, rounded to the dtype.
void FillBox(const FieldType& type, const GridShape& shape, const Box& box, double value,
             void* array);

}  // namespace gradred::diff
