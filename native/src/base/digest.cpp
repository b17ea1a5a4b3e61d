#include "base/digest.h"

#include <cstring>

namespace gradred {
namespace {

uint64_t Mix(uint64_t x) {  // the finalizer of MurmurHash3 (public domain, A. Appleby)
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

}  // namespace

Digest DigestOf(const std::string& text, uint64_t key) {
  uint64_t a = Mix(key ^ 0x9e3779b97f4a7c15ULL), b = Mix(key + text.size());
  for (size_t i = 0; i < text.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, text.size() - i < 8 ? text.size() - i : 8);
    a = Mix(a ^ word) + b;
    b = Mix(b + word) ^ (a << 23 | a >> 41);
  }
  return {Mix(a ^ b), Mix(b + 0x632be59bd9b4e019ULL * a)};
}

}  // namespace gradred
