// The iterations of Solver.
#pragma once

#include "sparse/solve.h"

namespace gradred::sparse {

// Sums and largest of numbers over the ranks, the same bits on all of them, in one message.
std::vector<double> SumOverRanks(diff::Channel& channel, const std::vector<double>& numbers);
std::vector<double> MaxOverRanks(diff::Channel& channel, const std::vector<double>& numbers);

struct System {
  diff::Channel& channel;
  Products<double>& products;
  const double* values;
  bool transposed;
  Preconditioner& preconditioner;
  int64_t size;  // own rows

  void Multiply(const double* x, double* y) const;
  void Precondition(const double* r, double* z) const { preconditioner.Apply(r, z, transposed); }
};

// `b_norm`: of b, over all ranks, not 0. x is set. All throw diff::AgreedError.
SolveReport RunCg(const System& system, const SolveOptions& options, const double* b, double b_norm,
                  double* x);
SolveReport RunBicgstab(const System& system, const SolveOptions& options, const double* b,
                        double b_norm, double* x);
SolveReport RunGmres(const System& system, const SolveOptions& options, const double* b,
                     double b_norm, double* x);

}  // namespace gradred::sparse
