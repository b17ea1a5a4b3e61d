#include "diff/box.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/status.h"
#include "reduce/convert.h"

namespace gradred::diff {
namespace {

// A box as runs of consecutive elements: run(o, i, j) starts at o * outer + i * row[0] + j * row[1]
// + start.
struct Runs {
  int64_t outer_stride, start;
  int64_t counts[2], strides[2];
  int64_t length;
};

Runs RunsOf(const FieldType& type, const GridShape& shape, const Box& box) {
  const int64_t stride1 = shape[2] * type.inner, stride0 = shape[1] * stride1;
  Runs runs{shape[0] * stride0,
            box.begin[0] * stride0 + box.begin[1] * stride1 + box.begin[2] * type.inner,
            {box.extent[0], box.extent[1]},
            {stride0, stride1},
            box.extent[2] * type.inner};
  if (box.extent[2] == shape[2]) {  // whole rows follow each other
    runs.length *= std::exchange(runs.counts[1], 1);
    if (box.extent[1] == shape[1]) runs.length *= std::exchange(runs.counts[0], 1);
  }
  return runs;
}

// each(element of the array, element of the packed box, elements)
template <class Each>
void ForEachRun(const FieldType& type, const GridShape& shape, const Box& box, const Each& each) {
  if (box.points() == 0 || type.inner == 0) return;
  const Runs runs = RunsOf(type, shape, box);
  int64_t packed = 0;
  for (int64_t o = 0; o < type.outer; ++o) {
    for (int64_t i = 0; i < runs.counts[0]; ++i) {
      const int64_t at = o * runs.outer_stride + runs.start + i * runs.strides[0];
      for (int64_t j = 0; j < runs.counts[1]; ++j) {
        each(at + j * runs.strides[1], packed, runs.length);
        packed += runs.length;
      }
    }
  }
}

template <class T>
inline void CopyRun(T* to, const T* from, int64_t count) {
  constexpr int64_t kShort = 8;  // below this a call of memcpy costs more than it moves
  if (count < kShort) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  } else {
    std::memcpy(to, from, count * sizeof(T));
  }
}

inline void AddRun(Float16* to, const Float16* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat16(ToFloat(to[i]) + ToFloat(from[i]));
}
inline void AddRun(Bfloat16* to, const Bfloat16* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = ToBfloat16(ToFloat(to[i]) + ToFloat(from[i]));
}
template <class T>
inline void AddRun(T* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// body(T{}) with the integer of the dtype's size: bits are moved.
template <class Body>
void ForSize(DType dtype, const Body& body) {
  switch (DTypeSize(dtype)) {
    case 1:
      return body(uint8_t{});
    case 2:
      return body(uint16_t{});
    case 4:
      return body(uint32_t{});
    default:
      return body(uint64_t{});
  }
}

// body(T{}) with the dtype's own type.
template <class Body>
void ForFloating(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBfloat16:
      return body(Bfloat16{});
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat64:
      return body(double{});
    default:
      throw Error(Kind::kUnsupported, std::string("adding elements of a grid: expected a floating "
                                                  "dtype, got ") +
                                          DTypeName(dtype));
  }
}

// each(run of from, run of to, elements) in one array
template <class Each>
void ForEachPair(const FieldType& type, const GridShape& shape, const Box& from, const Box& to,
                 const Each& each) {
  if (from.points() == 0 || type.inner == 0) return;
  const Runs source = RunsOf(type, shape, from);
  const int64_t shift = RunsOf(type, shape, to).start - source.start;
  ForEachRun(type, shape, from,
             [&](int64_t at, int64_t /*packed*/, int64_t count) { each(at, at + shift, count); });
}

}  // namespace

void Pack(const FieldType& type, const GridShape& shape, const Box& box, const void* array,
          void* packed) {
  ForSize(type.dtype, [&](auto t) {
    using T = decltype(t);
    ForEachRun(type, shape, box, [&](int64_t at, int64_t p, int64_t count) {
      CopyRun(static_cast<T*>(packed) + p, static_cast<const T*>(array) + at, count);
    });
  });
}

void Unpack(const FieldType& type, const GridShape& shape, const Box& box, const void* packed,
            void* array) {
  ForSize(type.dtype, [&](auto t) {
    using T = decltype(t);
    ForEachRun(type, shape, box, [&](int64_t at, int64_t p, int64_t count) {
      CopyRun(static_cast<T*>(array) + at, static_cast<const T*>(packed) + p, count);
    });
  });
}

void UnpackAdd(const FieldType& type, const GridShape& shape, const Box& box, const void* packed,
               void* array) {
  ForFloating(type.dtype, [&](auto t) {
    using T = decltype(t);
    ForEachRun(type, shape, box, [&](int64_t at, int64_t p, int64_t count) {
      AddRun(static_cast<T*>(array) + at, static_cast<const T*>(packed) + p, count);
    });
  });
}

void CopyBox(const FieldType& type, const GridShape& shape, const Box& from, const Box& to,
             void* array) {
  ForSize(type.dtype, [&](auto t) {
    using T = decltype(t);
    T* const data = static_cast<T*>(array);
    ForEachPair(type, shape, from, to, [&](int64_t source, int64_t target, int64_t count) {
      CopyRun(data + target, data + source, count);
    });
  });
}

void AddBox(const FieldType& type, const GridShape& shape, const Box& from, const Box& to,
            void* array) {
  ForFloating(type.dtype, [&](auto t) {
    using T = decltype(t);
    T* const data = static_cast<T*>(array);
    ForEachPair(type, shape, from, to, [&](int64_t source, int64_t target, int64_t count) {
      AddRun(data + target, data + source, count);
    });
  });
}

void FillBox(const FieldType& type, const GridShape& shape, const Box& box, double value,
             void* array) {
  ForSize(type.dtype, [&](auto t) {
    using T = decltype(t);
    T element{};
    if (value != 0) reduce::Convert(&element, type.dtype, &value, DType::kFloat64, 1, 1.0, nullptr);
    ForEachRun(type, shape, box, [&](int64_t at, int64_t /*packed*/, int64_t count) {
      std::fill_n(static_cast<T*>(array) + at, count, element);
    });
  });
}

}  // namespace gradred::diff
