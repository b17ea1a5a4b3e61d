// The loops of the propagators over a part of a row, compiled for several instruction sets and
// chosen at run time. All sets give the same bits.
#pragma once

#include <cstdint>

namespace gradred::pde {

// Pointers are to the first value of the part; `stride` is from row to row of every field.

// Damping in a perfectly matched layer, of the rows before, here and behind, and along the row.
template <class T>
struct Damping {
  T before, here, behind;
  const T* along;  // valid from [-1] to [n]
  T dt;
};

template <class T>
struct Spacing {
  T second0, second1;  // 1 / h^2 of each axis
  T first0, first1;    // 1 / (2 h)
};

// Note [Acoustic step]
//
// u_tt = m (laplacian(u) + div(w)) + f with a perfectly matched layer: M. J. Grote and I. Sim,
// arXiv:1001.0319, equations for two dimensions, with the auxiliary field divided by m, so that it
// does not depend on m. With s and r the damping along axis 0 and axis 1, D central differences,
// L the five-point laplacian, A = 1 / (1 + (s + r) dt / 2), k = dt^2 m A:
//
//   sum  = L u + D0 phi + D1 psi
//   u'   = A ((2 - s r dt^2) u - (1 - (s + r) dt / 2) u_before) + k sum
//   phi' = (1 - s dt) phi + dt (r - s) D0 u
//   psi' = (1 - r dt) psi + dt (s - r) D1 u
//
// Its adjoint, with y, p, q the cotangents of u', phi', psi' and y_after that of u'':
//
//   cotangent of u   = A (2 - s r dt^2) y - A (1 - (s + r) dt / 2) y_after + L (k y)
//                      - D0 (dt (r - s) p) - D1 (dt (s - r) q)
//   cotangent of phi = (1 - s dt) p - D0 (k y),  of psi = (1 - r dt) q - D1 (k y)
//   cotangent of k  += y sum
//
// Where s = r = 0 the auxiliary fields are zero and stay so.
template <class T>
struct AcousticLoops {
  // u' over u_before; `saved`, where not null, gets `sum`.
  void (*step)(T* out, const T* u, const T* k, int64_t stride, int64_t n, Spacing<T> spacing,
               T* saved);
  void (*damped_step)(T* out, const T* u, const T* k, const T* phi, const T* psi, int64_t stride,
                      int64_t n, Spacing<T> spacing, Damping<T> damping, T* saved);
  void (*damped_update)(T* phi, T* psi, const T* u, int64_t stride, int64_t n, Spacing<T> spacing,
                        Damping<T> damping);
  // The cotangent of u over y_after; y * saved is added to `gradient`.
  void (*adjoint)(T* out, const T* y, const T* k, int64_t stride, int64_t n, Spacing<T> spacing,
                  const T* saved, T* gradient);
  void (*damped_adjoint)(T* out, const T* y, const T* k, const T* p, const T* q, int64_t stride,
                         int64_t n, Spacing<T> spacing, Damping<T> damping, const T* saved,
                         T* gradient);
  void (*damped_adjoint_update)(T* p, T* q, const T* y, const T* k, int64_t stride, int64_t n,
                                Spacing<T> spacing, Damping<T> damping);
};

// Note [Heat step]
//
// u_t = div(k grad u) + f by fluxes: u' = u + dt sum over faces of (k + k_beyond) / 2 (u_beyond -
// u) / h^2. The operator is symmetric, so the cotangent of u is the same step of the cotangent y of
// u', and that of k is -dt / 2 sum over faces of (u_beyond - u)(y_beyond - y) / h^2.
template <class T>
struct HeatLoops {
  // `rate0`, `rate1`: dt / (2 h^2).
  void (*step)(T* out, const T* u, const T* k, int64_t stride, int64_t n, T rate0, T rate1);
  void (*gradient)(T* gradient, const T* u, const T* y, int64_t stride, int64_t n, T rate0,
                   T rate1);
};

template <class T>
const AcousticLoops<T>& AcousticLoopsHere();
template <class T>
const HeatLoops<T>& HeatLoopsHere();

}  // namespace gradred::pde
