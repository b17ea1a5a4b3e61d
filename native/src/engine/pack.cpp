#include "engine/pack.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace gradred::engine {
namespace {

using reduce::ConvertCounts;
using reduce::ReduceOp;
using Form = MemberPlan::Form;

// What a rank without a tensor contributes: zero, or for min, max and product the value that
// changes nothing.
template <class T>
void FillWith(void* data, int64_t count, T value) {
  T* at = static_cast<T*>(data);
  std::fill(at, at + count, value);
}

template <class T>
void FillLimits(void* data, int64_t count, ReduceOp op) {
  FillWith<T>(
      data, count,
      op == ReduceOp::kMin ? std::numeric_limits<T>::max() : std::numeric_limits<T>::lowest());
}

void FillNeutral(void* data, DType dtype, int64_t count, ReduceOp op) {
  if (op == ReduceOp::kProduct) {
    switch (dtype) {
      case DType::kBool:
      case DType::kUint8:
      case DType::kInt8:
        return FillWith<uint8_t>(data, count, 1);
      case DType::kUint16:
      case DType::kInt16:
        return FillWith<int16_t>(data, count, 1);
      case DType::kUint32:
      case DType::kInt32:
        return FillWith<int32_t>(data, count, 1);
      case DType::kUint64:
      case DType::kInt64:
        return FillWith<int64_t>(data, count, 1);
      case DType::kFloat16:
        return FillWith<uint16_t>(data, count, 0x3c00);
      case DType::kBfloat16:
        return FillWith<uint16_t>(data, count, 0x3f80);
      case DType::kFloat32:
        return FillWith<float>(data, count, 1);
      case DType::kFloat64:
        return FillWith<double>(data, count, 1);
    }
  }
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
    const bool min = op == ReduceOp::kMin;
    switch (dtype) {
      case DType::kBool:
        return FillWith<uint8_t>(data, count, min ? 1 : 0);
      case DType::kUint8:
        return FillLimits<uint8_t>(data, count, op);
      case DType::kUint16:
        return FillLimits<uint16_t>(data, count, op);
      case DType::kUint32:
        return FillLimits<uint32_t>(data, count, op);
      case DType::kUint64:
        return FillLimits<uint64_t>(data, count, op);
      case DType::kInt8:
        return FillLimits<int8_t>(data, count, op);
      case DType::kInt16:
        return FillLimits<int16_t>(data, count, op);
      case DType::kInt32:
        return FillLimits<int32_t>(data, count, op);
      case DType::kInt64:
        return FillLimits<int64_t>(data, count, op);
      case DType::kFloat16:
        return FillWith<uint16_t>(data, count, min ? 0x7c00 : 0xfc00);
      case DType::kBfloat16:
        return FillWith<uint16_t>(data, count, min ? 0x7f80 : 0xff80);
      case DType::kFloat32:
        return FillWith<float>(data, count,
                               (min ? 1 : -1) * std::numeric_limits<float>::infinity());
      case DType::kFloat64:
        return FillWith<double>(data, count,
                                (min ? 1 : -1) * std::numeric_limits<double>::infinity());
    }
  }
  std::memset(data, 0, static_cast<size_t>(count * DTypeSize(dtype)));
}

}  // namespace

void PackElements(const EntrySpec& entry, const MemberPlan& member, const void* input,
                  int64_t first, int64_t count, int set_size, void* at, ConvertCounts* counts) {
  const void* from =
      input ? static_cast<const char*>(input) + first * DTypeSize(entry.dtype) : nullptr;
  if (!from) {
    FillNeutral(at, member.wire, member.form == Form::kInt64Average ? 2 * count : count,
                member.form == Form::kPlain ? entry.reduce_op : ReduceOp::kSum);
  } else if (member.form == Form::kInt64Average) {
    if (entry.dtype == DType::kUint64)
      reduce::PackInt64Average(static_cast<int64_t*>(at), static_cast<const uint64_t*>(from), count,
                               set_size);
    else
      reduce::PackInt64Average(static_cast<int64_t*>(at), static_cast<const int64_t*>(from), count,
                               set_size);
  } else {
    reduce::Convert(at, member.wire, from, entry.dtype, count, entry.prescale, counts);
  }
}

void PackMember(const EntrySpec& entry, const MemberPlan& member, const void* input, int set_size,
                void* base, ConvertCounts* counts) {
  char* const at = static_cast<char*>(base);
  PackElements(entry, member, input, 0, member.count, set_size, at + member.offset, counts);
  std::memset(at + member.end(), 0,
              static_cast<size_t>(reduce::AlignUp(member.end()) - member.end()));
}

void UnpackElements(const EntrySpec& entry, const MemberPlan& member, void* output, int64_t first,
                    int64_t count, int set_size, double average_residual, const void* at,
                    ConvertCounts* counts) {
  void* to = static_cast<char*>(output) + first * DTypeSize(entry.dtype);
  if (member.form == Form::kInt64Average) {
    if (entry.dtype == DType::kUint64)
      reduce::UnpackInt64Average(static_cast<uint64_t*>(to), static_cast<const int64_t*>(at), count,
                                 set_size);
    else
      reduce::UnpackInt64Average(static_cast<int64_t*>(to), static_cast<const int64_t*>(at), count,
                                 set_size);
  } else if (member.form == Form::kIntegerAverage) {
    reduce::UnpackIntegerAverage(to, entry.dtype, static_cast<const int64_t*>(at), count, set_size);
  } else {
    double scale = entry.postscale;
    if (entry.reduce_op == ReduceOp::kAverage)
      scale *= IsHalf(member.wire) ? average_residual : 1.0 / set_size;
    reduce::Convert(to, entry.dtype, at, member.wire, count, scale,
                    IsHalf(member.wire) ? counts : nullptr,
                    reduce::StoresFor(member.count * DTypeSize(entry.dtype)));
    return;
  }
  if (entry.postscale != 1.0)
    reduce::Convert(to, entry.dtype, to, entry.dtype, count, entry.postscale, nullptr);
}

}  // namespace gradred::engine
