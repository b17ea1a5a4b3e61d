// Products with a distributed matrix, and its assembly.
#pragma once

#include "base/dtype.h"
#include "sparse/pattern.h"

namespace gradred::sparse {

// Note [Transposition]
// All are linear in each argument, and the set is closed under transposition:
//
//   y = Multiply(A, x)      gives  A' = Outer(y', x),  x' = MultiplyTransposed(A, y')
//   x = MultiplyTransposed(A, y)   A' = Outer(y, x'),  y' = Multiply(A, x')
//   A = Outer(y, x)                y' = Multiply(A', x),  x' = MultiplyTransposed(A', y)
//   A = Assemble(t)                t' = AssembleAdjoint(A'), and back

// The products of one operation. T: float or double. Collective, except for the constructor;
// pattern and channel outlive it. Arrays: values of nonzeros(), x over the own columns, y over the
// own rows.
template <class T>
class Products {
 public:
  // Takes its scratch memory from the channel.
  Products(const Pattern& pattern, diff::Channel& channel);

  // y = A x. Rows are summed in the order of columns: the same bits whatever the number of ranks.
  void Multiply(const T* values, const T* x, T* y);
  // x = A' y.
  void MultiplyTransposed(const T* values, const T* y, T* x);
  // values(i, j) = y(i) * x(j) on the pattern.
  void Outer(const T* y, const T* x, T* values);

 private:
  void StartHalo(const T* x);

  const Pattern& p_;
  diff::Channel& channel_;
  T* borders_;  // own elements that neighbours have as ghosts
  T* ghosts_;
};

// The value of each entry is the sum of its triplets' on all ranks.
template <class T>
void Assemble(const Pattern& pattern, diff::Channel& channel, const T* triplets, T* values);
// Each triplet gets the value of its entry.
template <class T>
void AssembleAdjoint(const Pattern& pattern, diff::Channel& channel, const T* values, T* triplets);

}  // namespace gradred::sparse
