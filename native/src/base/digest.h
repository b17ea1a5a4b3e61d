// A keyed 128-bit digest for comparing texts over ranks (not for security).
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

namespace gradred {

struct Digest {
  uint64_t hi = 0, lo = 0;
  bool operator==(const Digest& o) const { return hi == o.hi && lo == o.lo; }
  bool operator!=(const Digest& o) const { return !(*this == o); }
  bool operator<(const Digest& o) const { return std::tie(hi, lo) < std::tie(o.hi, o.lo); }
};

Digest DigestOf(const std::string& text, uint64_t key);

}  // namespace gradred
