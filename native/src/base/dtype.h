// Element types of tensors and wires, and exact conversions of the half types.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace gradred {

enum class DType : uint8_t {
  kBool,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
};
constexpr int kDTypeCount = 13;

int DTypeSize(DType dtype);          // bytes an element
const char* DTypeName(DType dtype);  // "float16", as NumPy writes it
bool DTypeFromName(const std::string& name, DType* dtype);

inline bool IsHalf(DType d) { return d == DType::kFloat16 || d == DType::kBfloat16; }
inline bool IsFloating(DType d) {
  return IsHalf(d) || d == DType::kFloat32 || d == DType::kFloat64;
}
inline bool IsInteger(DType d) { return !IsFloating(d) && d != DType::kBool; }

// Storage types: distinct, so that a template picks the right conversion.
struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

// Round to nearest even; overflow becomes infinity, NaN stays NaN. Written without branches that
// depend on data more than needed, so that compilers vectorise loops over them.
float ToFloat(Float16 h);
Float16 ToFloat16(float f);

inline float ToFloat(Bfloat16 h) {
  const uint32_t u = static_cast<uint32_t>(h.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

inline Bfloat16 ToBfloat16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;  // quiet, and never rounded to infinity
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

}  // namespace gradred
