#include "pde/kernels.h"

namespace gradred::pde {
namespace {

namespace scalar {
#define GRADRED_TARGET
#include "pde/loops.inc"
#undef GRADRED_TARGET
}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
#define GRADRED_TARGET __attribute__((target("avx2")))
#include "pde/loops.inc"
#undef GRADRED_TARGET
}  // namespace avx2
namespace avx512 {
#define GRADRED_TARGET __attribute__((target("avx512f,avx512dq,avx512vl,avx2")))
#include "pde/loops.inc"
#undef GRADRED_TARGET
}  // namespace avx512
#endif

enum class Set { kScalar, kAvx2, kAvx512 };

Set SetHere() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Set::kAvx512;
  if (__builtin_cpu_supports("avx2")) return Set::kAvx2;
#endif
  return Set::kScalar;
}

}  // namespace

template <class T>
const AcousticLoops<T>& AcousticLoopsHere() {
#if defined(__x86_64__)
  if (SetHere() == Set::kAvx512) return avx512::kAcoustic<T>;
  if (SetHere() == Set::kAvx2) return avx2::kAcoustic<T>;
#endif
  return scalar::kAcoustic<T>;
}

template <class T>
const HeatLoops<T>& HeatLoopsHere() {
#if defined(__x86_64__)
  if (SetHere() == Set::kAvx512) return avx512::kHeat<T>;
  if (SetHere() == Set::kAvx2) return avx2::kHeat<T>;
#endif
  return scalar::kHeat<T>;
}

template const AcousticLoops<float>& AcousticLoopsHere<float>();
template const AcousticLoops<double>& AcousticLoopsHere<double>();
template const HeatLoops<float>& HeatLoopsHere<float>();
template const HeatLoops<double>& HeatLoopsHere<double>();

}  // namespace gradred::pde
