// Iterative solution of A x = b with a distributed matrix.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "sparse/product.h"

namespace gradred::sparse {

enum class Method : uint8_t {
  kCg,        // conjugate gradients: symmetric positive definite matrices
  kBicgstab,  // stabilised biconjugate gradients (van der Vorst, doi:10.1137/0913035): any other
  kGmres,     // generalised minimal residuals, begun anew after 30 iterations (Saad and Schultz,
              // doi:10.1137/0907058): any; each iteration is dearer than the one before
};
enum class Preconditioning : uint8_t { kNone, kJacobi, kBoomerAmg };
const char* MethodName(Method method);
const char* PreconditioningName(Preconditioning preconditioning);

struct SolveOptions {
  Method method = Method::kCg;
  Preconditioning preconditioning = Preconditioning::kJacobi;
  // Finished when the norm of b - A x, computed anew, is at most max(rtol * norm of b, atol).
  double rtol = 1e-10, atol = 0;
  int64_t max_iterations = 10000;
  std::string hypre_library;  // for kBoomerAmg: path; empty: the usual names
};

struct SolveReport {
  std::vector<double>
      residuals;  // norms over that of b: before the first iteration, and after each
  int64_t iterations() const { return static_cast<int64_t>(residuals.size()) - 1; }
};

// z = M r, or M' r; M is about the inverse of the matrix. Collective.
class Preconditioner {
 public:
  virtual ~Preconditioner() = default;
  virtual void Apply(const double* r, double* z, bool transposed) = 0;
};

// Solves with one pattern, and keeps what was set up for the matrix's values until they change, for
// the transposed system too. Used by the worker of one context.
class Solver {
 public:
  // The pattern is square, with equal stripes of rows and columns.
  Solver(PatternPtr pattern, SolveOptions options);
  ~Solver();

  // x = A^-1 b, or A'^-1 b; starts from zero. With kCg the matrix is its own transpose. The
  // iterates do not depend on the number of ranks, but for rounding, where the preconditioner does
  // not. Collective. Throws diff::AgreedError with the residuals when it does not converge, for a
  // matrix that the method or the preconditioner cannot work with, and where a number of the
  // solution is above `largest`, which `dtype` can hold.
  SolveReport Solve(diff::Channel& channel, const double* values, const double* b, double* x,
                    bool transposed, const char* dtype = "float64",
                    double largest = std::numeric_limits<double>::max());

  int64_t setups() const { return setups_; }  // of the preconditioner

 private:
  void SetUp(diff::Channel& channel, const double* values);

  const PatternPtr pattern_;
  const SolveOptions options_;
  std::vector<double> values_;  // that the preconditioner was set up for
  std::unique_ptr<Preconditioner> preconditioner_;
  int64_t setups_ = 0;
};

}  // namespace gradred::sparse
