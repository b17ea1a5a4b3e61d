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

}  // namespace

std::vector<double> SumOverRanks(diff::Channel& channel, const std::vector<double>& numbers) {
  std::vector<double> sums(numbers.size());
  const diff::Input input{numbers.data(), DType::kFloat64, {static_cast<int64_t>(numbers.size())}};
  diff::ReduceTensor(input, reduce::ReduceOp::kSum, sums.data(), channel);
  return sums;
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

}  // namespace gradred::sparse
