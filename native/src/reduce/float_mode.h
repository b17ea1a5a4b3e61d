// Arithmetic as IEEE 754 has it, whatever mode the calling thread is in.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradred::reduce {

// Frameworks run their threads with "denormals are zero". Packing happens on theirs and on ours,
// and the result must not depend on which. While one of these lives, subnormals are kept and
// rounding is to nearest even.
class IeeeMode {
 public:
  IeeeMode() : saved_(Get()) {
    if (saved_ & kOther) Set(saved_ & ~kOther);
  }
  ~IeeeMode() {
    if (saved_ & kOther) Set(saved_);
  }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kOther = 0xe040;  // MXCSR: flush to zero, rounding, denormals are zero
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kOther = 0x1c00000;  // FPCR: flush to zero, rounding
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  static constexpr uint64_t kOther = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif
  const uint64_t saved_;
};

}  // namespace gradred::reduce
