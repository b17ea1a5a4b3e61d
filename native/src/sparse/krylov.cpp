#include "sparse/krylov.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "diff/reduction.h"

namespace gradred::sparse {
namespace {

using Vector = std::vector<double>;

// Four sums side by side: one would wait for the adder at each element.
double Dot(const Vector& a, const Vector& b) {
  double sums[4] = {};
  const size_t n = a.size(), whole = n / 4 * 4;
  for (size_t i = 0; i < whole; i += 4)
    for (size_t j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
  for (size_t i = whole; i < n; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

std::string Short(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

// The residuals of one solve, and when it is over.
class Progress {
 public:
  Progress(const System& system, const SolveOptions& options, double b_norm)
      : system_(system),
        options_(options),
        b_norm_(b_norm),
        target_(std::max(options.rtol * b_norm, options.atol)) {
    report_.residuals.push_back(1);
  }

  bool Reached(double rr) const { return std::sqrt(rr) <= target_; }
  // After an iteration; rr: square of the residual's norm.
  void Add(double rr) {
    report_.residuals.push_back(std::sqrt(rr) / b_norm_);
    if (!std::isfinite(rr)) Fail("gave numbers that are infinite or NaN");
  }
  // The residual computed anew replaces the one that was updated from step to step.
  void Replace(double rr) { report_.residuals.back() = std::sqrt(rr) / b_norm_; }
  bool Exhausted() const { return report_.iterations() >= options_.max_iterations; }
  SolveReport Take() { return std::move(report_); }

  [[noreturn]] void FailToConverge() const { Fail("has not converged"); }
  [[noreturn]] void Fail(const std::string& how) const {
    const Vector& residuals = report_.residuals;
    std::string text = std::string("solve in context '") + system_.channel.name() +
                       "': " + MethodName(options_.method) + " with " +
                       PreconditioningName(options_.preconditioning) + " " + how + " after " +
                       std::to_string(report_.iterations()) +
                       " iterations; norm of the residual over that of the right-hand side: "
                       "expected at most " +
                       Short(target_ / b_norm_) + ", got " + Short(residuals.back()) +
                       "; residuals";
    const size_t step = std::max<size_t>(1, (residuals.size() + 18) / 19);
    text += step > 1 ? " of every " + std::to_string(step) + "th iteration:" : ":";
    for (size_t i = 0; i < residuals.size(); i += step) text += " " + Short(residuals[i]);
    throw diff::AgreedError(Kind::kInvalidArgument, text);
  }

 private:
  const System& system_;
  const SolveOptions& options_;
  const double b_norm_, target_;
  SolveReport report_;
};

// *r = b - A x
void TrueResidual(const System& system, const double* b, const double* x, Vector* r) {
  system.Multiply(x, r->data());
  for (size_t i = 0; i < r->size(); ++i) (*r)[i] = b[i] - (*r)[i];
}

std::vector<double> OverRanks(diff::Channel& channel, reduce::ReduceOp op,
                              const std::vector<double>& numbers) {
  std::vector<double> results(numbers.size());
  const diff::Input input{numbers.data(), DType::kFloat64, {static_cast<int64_t>(numbers.size())}};
  diff::ReduceTensor(input, op, results.data(), channel);
  return results;
}

// What gmres knows of a matrix on an orthonormal basis of a Krylov space: the triangular factor of
// its Hessenberg matrix, by Givens rotations, and the right-hand side that they turn.
class HessenbergFactor {
 public:
  explicit HessenbergFactor(double norm) : right_{norm} {}

  // `column`: of the Hessenberg matrix, one element longer than the last one.
  void Add(Vector column) {
    const size_t k = columns_.size();
    for (size_t i = 0; i < k; ++i) {
      const double upper = cosines_[i] * column[i] + sines_[i] * column[i + 1];
      column[i + 1] = cosines_[i] * column[i + 1] - sines_[i] * column[i];
      column[i] = upper;
    }
    const double length = std::hypot(column[k], column[k + 1]);
    cosines_.push_back(length > 0 ? column[k] / length : 1);
    sines_.push_back(length > 0 ? column[k + 1] / length : 0);
    column[k] = length;
    columns_.push_back(std::move(column));
    right_.push_back(-sines_[k] * right_[k]);
    right_[k] *= cosines_[k];
  }

  bool singular() const { return columns_.back()[columns_.size() - 1] == 0; }
  // Of the best approximation in the space.
  double residual() const { return right_.back(); }

  // That approximation's coefficients.
  Vector Solve() const {
    Vector y(right_.begin(), right_.end() - 1);
    for (size_t i = y.size(); i-- > 0;) {
      for (size_t j = i + 1; j < y.size(); ++j) y[i] -= columns_[j][i] * y[j];
      y[i] /= columns_[i][i];
    }
    return y;
  }

 private:
  std::vector<Vector> columns_;
  Vector cosines_, sines_, right_;
};

// *w minus its part along the basis, whose coefficients are returned; the norm of the rest behind
// them. Classical Gram-Schmidt, twice: three sums over ranks, however large the basis is (Giraud,
// Langou and Rozloznik, doi:10.1016/j.camwa.2005.08.009).
Vector Orthogonalise(const System& system, const std::vector<Vector>& basis, Vector* w) {
  Vector column(basis.size() + 1);
  for (int pass = 0; pass < 2; ++pass) {
    Vector parts;
    for (const Vector& v : basis) parts.push_back(Dot(v, *w));
    parts = SumOverRanks(system.channel, parts);
    for (size_t i = 0; i < basis.size(); ++i) {
      column[i] += parts[i];
      for (size_t j = 0; j < w->size(); ++j) (*w)[j] -= parts[i] * basis[i][j];
    }
  }
  column.back() = std::sqrt(SumOverRanks(system.channel, {Dot(*w, *w)})[0]);
  return column;
}

Vector Scaled(Vector v, double factor) {
  for (double& value : v) value *= factor;
  return v;
}

}  // namespace

std::vector<double> SumOverRanks(diff::Channel& channel, const std::vector<double>& numbers) {
  return OverRanks(channel, reduce::ReduceOp::kSum, numbers);
}

std::vector<double> MaxOverRanks(diff::Channel& channel, const std::vector<double>& numbers) {
  return OverRanks(channel, reduce::ReduceOp::kMax, numbers);
}

void System::Multiply(const double* x, double* y) const {
  if (transposed)
    products.MultiplyTransposed(values, x, y);
  else
    products.Multiply(values, x, y);
}

SolveReport RunCg(const System& system, const SolveOptions& options, const double* b, double b_norm,
                  double* x) {
  Progress progress(system, options, b_norm);
  const int64_t n = system.size;
  Vector r(b, b + n), z(n), p, q(n);
  std::fill_n(x, n, 0.0);
  system.Precondition(r.data(), z.data());
  double rz = SumOverRanks(system.channel, {Dot(r, z)})[0];
  p = z;
  while (!progress.Exhausted()) {
    system.Multiply(p.data(), q.data());
    const double pq = SumOverRanks(system.channel, {Dot(p, q)})[0];
    if (!(pq > 0) || !(rz > 0))
      progress.Fail(
          "has found that the matrix or the preconditioner is not symmetric positive "
          "definite (bicgstab does not ask for it)");
    const double alpha = rz / pq;
    for (int64_t i = 0; i < n; ++i) {
      x[i] += alpha * p[i];
      r[i] -= alpha * q[i];
    }
    system.Precondition(r.data(), z.data());
    std::vector<double> sums = SumOverRanks(system.channel, {Dot(r, z), Dot(r, r)});
    progress.Add(sums[1]);
    double beta = sums[0] / rz;
    if (progress.Reached(sums[1])) {
      TrueResidual(system, b, x, &r);
      system.Precondition(r.data(), z.data());
      sums = SumOverRanks(system.channel, {Dot(r, z), Dot(r, r)});
      progress.Replace(sums[1]);
      if (progress.Reached(sums[1])) return progress.Take();
      beta = 0;  // anew from here
    }
    rz = sums[0];
    for (int64_t i = 0; i < n; ++i) p[i] = z[i] + beta * p[i];
  }
  progress.FailToConverge();
}

SolveReport RunBicgstab(const System& system, const SolveOptions& options, const double* b,
                        double b_norm, double* x) {
  // Of the norms' product: below it the shadow residual says nothing any more.
  constexpr double kSmall = 1e-14;
  Progress progress(system, options, b_norm);
  const int64_t n = system.size;
  Vector r(b, b + n), shadow = r, p = r, v(n), t(n), pm(n), sm(n);
  std::fill_n(x, n, 0.0);
  double rho = b_norm * b_norm, shadow_norm = b_norm;
  bool fresh = true;  // the shadow residual is the residual
  while (!progress.Exhausted()) {
    system.Precondition(p.data(), pm.data());
    system.Multiply(pm.data(), v.data());
    const double shadow_v = SumOverRanks(system.channel, {Dot(shadow, v)})[0];
    const double alpha = rho / shadow_v;
    if (!std::isfinite(alpha) && fresh) progress.Fail("has broken down");
    double omega = 0;
    if (std::isfinite(alpha)) {
      for (int64_t i = 0; i < n; ++i) r[i] -= alpha * v[i];
      system.Precondition(r.data(), sm.data());
      system.Multiply(sm.data(), t.data());
      const std::vector<double> sums = SumOverRanks(system.channel, {Dot(t, r), Dot(t, t)});
      omega = sums[1] > 0 ? sums[0] / sums[1] : 0;
      for (int64_t i = 0; i < n; ++i) {
        x[i] += alpha * pm[i] + omega * sm[i];
        r[i] -= omega * t[i];
      }
    }
    std::vector<double> sums = SumOverRanks(system.channel, {Dot(shadow, r), Dot(r, r)});
    progress.Add(sums[1]);
    const double r_norm = std::sqrt(sums[1]);
    fresh = omega == 0 || std::abs(sums[0]) <= kSmall * shadow_norm * r_norm;
    if (progress.Reached(sums[1])) {
      TrueResidual(system, b, x, &r);
      sums[1] = SumOverRanks(system.channel, {Dot(r, r)})[0];
      progress.Replace(sums[1]);
      if (progress.Reached(sums[1])) return progress.Take();
      fresh = true;
    }
    if (fresh) {  // anew from here
      shadow = p = r;
      rho = sums[1];
      shadow_norm = std::sqrt(rho);
      continue;
    }
    const double beta = sums[0] / rho * (alpha / omega);
    rho = sums[0];
    for (int64_t i = 0; i < n; ++i) p[i] = r[i] + beta * (p[i] - omega * v[i]);
  }
  progress.FailToConverge();
}

// Preconditioned on the right: what it makes least is the norm of b - A x.
SolveReport RunGmres(const System& system, const SolveOptions& options, const double* b,
                     double b_norm, double* x) {
  constexpr size_t kRestart = 30;
  Progress progress(system, options, b_norm);
  const int64_t n = system.size;
  Vector r(b, b + n), z(n), w(n);
  double norm = b_norm;
  std::fill_n(x, n, 0.0);
  while (!progress.Exhausted()) {
    std::vector<Vector> basis{Scaled(r, 1 / norm)};
    HessenbergFactor factor(norm);
    while (true) {
      system.Precondition(basis.back().data(), z.data());
      system.Multiply(z.data(), w.data());
      Vector column = Orthogonalise(system, basis, &w);
      const double rest = column.back();
      factor.Add(std::move(column));
      progress.Add(factor.residual() * factor.residual());
      if (factor.singular()) progress.Fail("has broken down");
      if (progress.Reached(factor.residual() * factor.residual()) || progress.Exhausted() ||
          basis.size() == kRestart || rest == 0)
        break;
      basis.push_back(Scaled(w, 1 / rest));
    }
    const Vector y = factor.Solve();
    std::fill(w.begin(), w.end(), 0.0);
    for (size_t k = 0; k < y.size(); ++k)
      for (int64_t i = 0; i < n; ++i) w[i] += y[k] * basis[k][i];
    system.Precondition(w.data(), z.data());
    for (int64_t i = 0; i < n; ++i) x[i] += z[i];
    TrueResidual(system, b, x, &r);
    const double rr = SumOverRanks(system.channel, {Dot(r, r)})[0];
    progress.Replace(rr);
    if (progress.Reached(rr)) return progress.Take();
    norm = std::sqrt(rr);
  }
  progress.FailToConverge();
}

}  // namespace gradred::sparse
