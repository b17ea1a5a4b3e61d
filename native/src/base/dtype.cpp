#include "base/dtype.h"

namespace gradred {
namespace {

struct Row {
  const char* name;
  int size;
};
constexpr Row kRows[kDTypeCount] = {
    {"bool", 1},     {"uint8", 1},   {"uint16", 2},  {"uint32", 4}, {"uint64", 8},
    {"int8", 1},     {"int16", 2},   {"int32", 4},   {"int64", 8},  {"float16", 2},
    {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
};

uint32_t Bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}
float FromBits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

}  // namespace

int DTypeSize(DType dtype) { return kRows[static_cast<int>(dtype)].size; }
const char* DTypeName(DType dtype) { return kRows[static_cast<int>(dtype)].name; }

bool DTypeFromName(const std::string& name, DType* dtype) {
  for (int i = 0; i < kDTypeCount; ++i)
    if (name == kRows[i].name) {
      *dtype = static_cast<DType>(i);
      return true;
    }
  return false;
}

float ToFloat(Float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return FromBits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The bits of a half, shifted to float position, are a float 2^112 times too small; subnormals
  // come out right too.
  const float scaled = FromBits(magnitude << 13) * FromBits(0x77800000u);  // times 2^112
  return FromBits(Bits(scaled) | sign);
}

Float16 ToFloat16(float f) {
  const uint32_t u = Bits(f);
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u)
    return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 puts the rounding at the right bit
    const float shifted = FromBits(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (Bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

}  // namespace gradred
