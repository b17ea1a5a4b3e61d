// Inputs whose reductions are exact in every dtype, and the serial references.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "comm/communicator.h"
#include "reduce/layout.h"

namespace conformance {

using namespace gradred;  // NOLINT: a test header
using Bytes = std::vector<char>;

inline uint64_t Hash(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * 0x9e3779b97f4a7c15ull + b * 0xc2b2ae3d27d4eb4full + c * 0x165667b19e3779f9ull;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 32;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline void StoreInteger(char* base, DType dtype, int64_t index, int64_t value) {
  const auto put = [&](auto typed) {
    std::memcpy(base + index * static_cast<int64_t>(sizeof typed), &typed, sizeof typed);
  };
  switch (dtype) {
    case DType::kBool:
      return put(static_cast<uint8_t>(value != 0));
    case DType::kUint8:
      return put(static_cast<uint8_t>(value));
    case DType::kUint16:
      return put(static_cast<uint16_t>(value));
    case DType::kUint32:
      return put(static_cast<uint32_t>(value));
    case DType::kUint64:
      return put(static_cast<uint64_t>(value));
    case DType::kInt8:
      return put(static_cast<int8_t>(value));
    case DType::kInt16:
      return put(static_cast<int16_t>(value));
    case DType::kInt32:
      return put(static_cast<int32_t>(value));
    case DType::kInt64:
      return put(value);
    case DType::kFloat16:
      return put(ToFloat16(static_cast<float>(value)));
    case DType::kBfloat16:
      return put(ToBfloat16(static_cast<float>(value)));
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(static_cast<double>(value));
  }
}

inline double LoadNumber(const char* base, DType dtype, int64_t index) {
  const auto get = [&](auto typed) {
    std::memcpy(&typed, base + index * static_cast<int64_t>(sizeof typed), sizeof typed);
    return typed;
  };
  switch (dtype) {
    case DType::kBool:
      return get(uint8_t{});
    case DType::kUint8:
      return get(uint8_t{});
    case DType::kUint16:
      return get(uint16_t{});
    case DType::kUint32:
      return get(uint32_t{});
    case DType::kUint64:
      return static_cast<double>(get(uint64_t{}));
    case DType::kInt8:
      return get(int8_t{});
    case DType::kInt16:
      return get(int16_t{});
    case DType::kInt32:
      return get(int32_t{});
    case DType::kInt64:
      return static_cast<double>(get(int64_t{}));
    case DType::kFloat16:
      return ToFloat(get(Float16{}));
    case DType::kBfloat16:
      return ToFloat(get(Bfloat16{}));
    case DType::kFloat32:
      return get(float{});
    case DType::kFloat64:
      return get(double{});
  }
  return 0;
}

// Small integers: no partial result of any order needs rounding. `halvings`: what an average is
// halved on its way.
inline int64_t InputValue(const reduce::Section& section, uint64_t seed, int rank, int64_t index,
                          int halvings) {
  const int64_t h = static_cast<int64_t>(Hash(seed + section.offset, rank, index) >> 8);
  const bool is_signed = IsFloating(section.dtype) || section.dtype >= DType::kInt8;
  switch (section.op) {
    case reduce::ReduceOp::kSum:
      return section.dtype == DType::kBool ? h % 4 == 0 : is_signed ? h % 7 - 3 : h % 7;
    case reduce::ReduceOp::kMin:
    case reduce::ReduceOp::kMax:
      return section.dtype == DType::kBool ? h % 2 : is_signed ? h % 201 - 100 : h % 201;
    case reduce::ReduceOp::kProduct: {
      if (section.dtype == DType::kBool) return h % 8 != 0;
      static constexpr int kFactors[] = {1, 2, 1, -1, 1};
      return is_signed ? kFactors[h % 5] : 1 + h % 2;
    }
    case reduce::ReduceOp::kAverage:
      return (h % 15 - 7) * (int64_t{1} << halvings);
    case reduce::ReduceOp::kBitAnd:
      return (h | h >> 8 | h >> 16) & 0xff;
  }
  return 0;
}

inline int64_t ReducedValue(const reduce::Section& section, uint64_t seed, int size, int64_t index,
                            int halvings) {
  int64_t result = InputValue(section, seed, 0, index, halvings);
  for (int r = 1; r < size; ++r) {
    const int64_t v = InputValue(section, seed, r, index, halvings);
    switch (section.op) {
      case reduce::ReduceOp::kAverage:
      case reduce::ReduceOp::kSum:
        result += v;
        break;
      case reduce::ReduceOp::kMin:
        result = std::min(result, v);
        break;
      case reduce::ReduceOp::kMax:
        result = std::max(result, v);
        break;
      case reduce::ReduceOp::kProduct:
        result *= v;
        break;
      case reduce::ReduceOp::kBitAnd:
        result &= v;
        break;
    }
  }
  return section.op == reduce::ReduceOp::kAverage ? result / (int64_t{1} << halvings) : result;
}

// Gaps between sections are zero.
inline Bytes Inputs(const reduce::Layout& layout, uint64_t seed, int rank, int halvings) {
  Bytes bytes(layout.nbytes());
  for (const reduce::Section& s : layout.sections()) {
    for (int64_t i = 0; i < s.count; ++i) {
      StoreInteger(bytes.data() + s.offset, s.dtype, i, InputValue(s, seed, rank, i, halvings));
    }
  }
  return bytes;
}

inline Bytes Reduced(const reduce::Layout& layout, uint64_t seed, int size, int halvings) {
  Bytes bytes(layout.nbytes());
  for (const reduce::Section& s : layout.sections()) {
    for (int64_t i = 0; i < s.count; ++i) {
      StoreInteger(bytes.data() + s.offset, s.dtype, i, ReducedValue(s, seed, size, i, halvings));
    }
  }
  return bytes;
}

// Floats of mixed signs and magnitudes, whose sum depends on the order. Floating sections only.
inline Bytes RoundedInputs(const reduce::Layout& layout, uint64_t seed, int rank) {
  Bytes bytes(layout.nbytes());
  for (const reduce::Section& s : layout.sections()) {
    for (int64_t i = 0; i < s.count; ++i) {
      const uint64_t h = Hash(seed + s.offset, rank, i);
      const double value =
          std::ldexp(static_cast<double>(h >> 11) - 0x1p52, -52 + static_cast<int>(h % 9) - 4);
      char* at = bytes.data() + s.offset + i * DTypeSize(s.dtype);
      const float single = static_cast<float>(value);
      const Float16 half = ToFloat16(single);
      const Bfloat16 brain = ToBfloat16(single);
      switch (s.dtype) {
        case DType::kFloat64:
          std::memcpy(at, &value, 8);
          break;
        case DType::kFloat32:
          std::memcpy(at, &single, 4);
          break;
        case DType::kFloat16:
          std::memcpy(at, &half, 2);
          break;
        default:
          std::memcpy(at, &brain, 2);
          break;
      }
    }
  }
  return bytes;
}

// Note [Order of summation] in reduce/layout.h, step by step: ranks of a node ascending, then nodes
// beyond the largest power of two p folded onto those p lower, then pairs at distance p/2, ..., 1.
// `halvings` as a whole, hops included.
inline Bytes ReduceInOrder(const reduce::Layout& layout, const std::vector<Bytes>& inputs,
                           const std::vector<int>& node_of, int halvings) {
  const reduce::Range all{0, layout.nbytes()};
  std::vector<std::vector<const void*>> members;
  for (size_t r = 0; r < inputs.size(); ++r) {
    if (static_cast<size_t>(node_of[r]) >= members.size()) members.resize(node_of[r] + 1);
    members[node_of[r]].push_back(inputs[r].data());
  }
  const int nodes = static_cast<int>(members.size());
  int p = 1, hops = 0;
  while (p * 2 <= nodes) p *= 2;
  while ((1 << hops) < nodes) ++hops;
  std::vector<Bytes> values(nodes, Bytes(layout.nbytes()));
  for (int n = 0; n < nodes; ++n) {
    layout.ReduceNode(values[n].data(), members[n].data(), static_cast<int>(members[n].size()), all,
                      std::ldexp(1.0f, hops - halvings));
  }
  const auto hop = [&](int a, int b) {
    layout.ReduceHop(values[a].data(), values[a].data(), values[b].data(), all);
  };
  for (int i = 0; i < p && p < nodes; ++i) {
    if (i + p < nodes) {
      hop(i, i + p);
    } else {
      layout.HopAlone(values[i].data(), all);
    }
  }
  for (int distance = p / 2; distance >= 1; distance /= 2) {
    for (int i = 0; i < distance; ++i) hop(i, i + distance);
  }
  return values[0];
}

// Empty when equal, else the first difference.
inline std::string Difference(const reduce::Layout& layout, const char* got, const char* expected,
                              reduce::Range range) {
  for (const reduce::Section& s : layout.sections()) {
    const int64_t width = DTypeSize(s.dtype);
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t at = s.offset + i * width;
      if (at < range.begin || at >= range.end) continue;
      if (std::memcmp(got + at, expected + at, width) == 0) continue;
      return std::string(reduce::ReduceOpName(s.op)) + " of " + DTypeName(s.dtype) +
             ", section at byte " + std::to_string(s.offset) + " of " + std::to_string(s.count) +
             " elements, element " + std::to_string(i) + ": expected " +
             std::to_string(LoadNumber(expected + s.offset, s.dtype, i)) + ", got " +
             std::to_string(LoadNumber(got + s.offset, s.dtype, i));
    }
  }
  return "";
}

// A section of `count` elements for each dtype with each of its operations, in an order given by
// `seed`. plain: without halves and bit-and, which MPI lacks.
inline comm::LayoutPtr MixedLayout(int64_t count, uint64_t seed, bool averages,
                                   bool plain = false) {
  std::vector<reduce::Section> sections;
  for (int d = 0; d < kDTypeCount; ++d) {
    const DType dtype = static_cast<DType>(d);
    if (plain && IsHalf(dtype)) continue;
    for (const auto op : {reduce::ReduceOp::kSum, reduce::ReduceOp::kMin, reduce::ReduceOp::kMax,
                          reduce::ReduceOp::kProduct}) {
      sections.push_back({0, count, dtype, op});
    }
    if (averages && IsHalf(dtype))
      sections.push_back({0, count, dtype, reduce::ReduceOp::kAverage});
    if (dtype == DType::kUint8 && !plain)
      sections.push_back({0, count, dtype, reduce::ReduceOp::kBitAnd});
  }
  std::mt19937_64 random(seed);
  for (size_t i = sections.size(); i > 1; --i) std::swap(sections[i - 1], sections[random() % i]);
  int64_t at = 0;
  for (reduce::Section& s : sections) {
    s.offset = at;
    at = reduce::AlignUp(at + s.count * DTypeSize(s.dtype));
  }
  return std::make_shared<reduce::Layout>(std::move(sections));
}

// Sections of the floating dtypes, sums (and averages of halves).
inline comm::LayoutPtr FloatingLayout(int64_t count, uint64_t seed, bool averages) {
  std::vector<reduce::Section> sections;
  int64_t at = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat64}) {
    for (const auto op : {reduce::ReduceOp::kSum, reduce::ReduceOp::kAverage}) {
      if (op == reduce::ReduceOp::kAverage && !(averages && IsHalf(dtype))) continue;
      const int64_t n =
          count + static_cast<int64_t>(Hash(seed, static_cast<uint64_t>(dtype), 7) % 5);
      sections.push_back({at, n, dtype, op});
      at = reduce::AlignUp(at + n * DTypeSize(dtype));
    }
  }
  return std::make_shared<reduce::Layout>(std::move(sections));
}

}  // namespace conformance
