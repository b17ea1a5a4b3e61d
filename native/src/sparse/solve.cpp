#include "sparse/solve.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "diff/operation.h"
#include "sparse/hypre.h"
#include "sparse/krylov.h"

namespace gradred::sparse {
namespace {

class Identity : public Preconditioner {
 public:
  explicit Identity(int64_t size) : size_(size) {}
  void Apply(const double* r, double* z, bool /*transposed*/) override { std::copy_n(r, size_, z); }

 private:
  const int64_t size_;
};

class Jacobi : public Preconditioner {
 public:
  Jacobi(const Pattern& pattern, const double* values) {
    for (const int64_t k : pattern.diagonal()) inverse_.push_back(1 / values[k]);
  }
  void Apply(const double* r, double* z, bool /*transposed*/) override {
    for (size_t i = 0; i < inverse_.size(); ++i) z[i] = inverse_[i] * r[i];
  }

 private:
  std::vector<double> inverse_;
};

// The first own row without a diagonal entry that can be divided by, in words; empty: none.
std::string FindBadRow(const Pattern& pattern, const double* values) {
  const auto& diagonal = pattern.diagonal();
  for (size_t i = 0; i < diagonal.size(); ++i) {
    if (diagonal[i] < 0 || !std::isfinite(1 / values[diagonal[i]]))
      return "jacobi: expected a diagonal entry that is not zero, got none in row " +
             std::to_string(pattern.first_row() + static_cast<int64_t>(i)) + " of the matrix";
  }
  return "";
}

// `refusal` of at least one rank is not empty. Of rows, the first one.
[[noreturn]] void Refuse(diff::Channel& channel, std::string refusal) {
  channel.Union(&refusal, [](const std::string& a, const std::string& b) {
    if (a.empty() || b.empty()) return a.empty() ? b : a;
    return std::make_pair(a.size(), a) < std::make_pair(b.size(), b) ? a : b;
  });
  throw diff::AgreedError(Kind::kInvalidArgument,
                          "solve in context '" + channel.name() + "': " + refusal);
}

auto* RunnerOf(Method method) {
  switch (method) {
    case Method::kCg:
      return &RunCg;
    case Method::kBicgstab:
      return &RunBicgstab;
    case Method::kGmres:
      break;
  }
  return &RunGmres;
}

}  // namespace

const char* MethodName(Method method) {
  switch (method) {
    case Method::kCg:
      return "cg";
    case Method::kBicgstab:
      return "bicgstab";
    case Method::kGmres:
      break;
  }
  return "gmres";
}

const char* PreconditioningName(Preconditioning preconditioning) {
  switch (preconditioning) {
    case Preconditioning::kNone:
      return "no preconditioner";
    case Preconditioning::kJacobi:
      return "jacobi";
    case Preconditioning::kBoomerAmg:
      break;
  }
  return "boomeramg";
}

Solver::Solver(PatternPtr pattern, SolveOptions options)
    : pattern_(std::move(pattern)), options_(options) {}

Solver::~Solver() = default;

void Solver::SetUp(diff::Channel& channel, const double* values) {
  values_.assign(values, values + pattern_->nonzeros());
  preconditioner_.reset();
  switch (options_.preconditioning) {
    case Preconditioning::kNone:
      preconditioner_ = std::make_unique<Identity>(pattern_->rows());
      break;
    case Preconditioning::kJacobi:
      preconditioner_ = std::make_unique<Jacobi>(*pattern_, values);
      break;
    case Preconditioning::kBoomerAmg: {
      if (channel.MpiCommunicator().empty())
        Refuse(channel, "boomeramg: expected a job on MPI, got none");
      preconditioner_ = MakeBoomerAmg(channel, *pattern_, values, options_.method == Method::kCg);
      break;
    }
  }
  ++setups_;
}

SolveReport Solver::Solve(diff::Channel& channel, const double* values, const double* b, double* x,
                          bool transposed, const char* dtype, double largest) {
  const Pattern& pattern = *pattern_;
  const int64_t n = pattern.rows();
  const bool changed = preconditioner_ == nullptr ||
                       std::memcmp(values_.data(), values, values_.size() * sizeof(double)) != 0;
  std::string refusal;
  if (options_.preconditioning == Preconditioning::kJacobi)
    refusal = FindBadRow(pattern, values);
  else if (options_.preconditioning == Preconditioning::kBoomerAmg)
    refusal = FindHypre(options_.hypre_library);
  double most_b = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    most_b = std::max(most_b, std::abs(b[i]));
    finite = finite && std::isfinite(b[i]);
  }
  const std::vector<double> most = MaxOverRanks(
      channel, {most_b, finite ? 0.0 : 1.0, refusal.empty() ? 0.0 : 1.0, changed ? 1.0 : 0.0});
  if (most[2] > 0) Refuse(channel, refusal);
  if (most[1] > 0) Refuse(channel, "right-hand side: expected finite numbers, got others");
  if (most[3] > 0) SetUp(channel, values);
  if (most[0] == 0) {
    std::fill_n(x, n, 0.0);
    return {{0}};
  }
  // Solves for b and x times a power of two, so that squares neither overflow nor vanish.
  int exponent = 0;
  std::frexp(most[0], &exponent);
  std::vector<double> scaled(b, b + n);
  double bb = 0;
  for (double& value : scaled) {
    value = std::ldexp(value, -exponent);
    bb += value * value;
  }
  SolveOptions options = options_;
  options.atol = std::ldexp(options.atol, -exponent);
  Products<double> products(pattern, channel);
  const bool transposes = transposed && options.method != Method::kCg;
  const System system{channel, products, values, transposes, *preconditioner_, n};
  const double norm = std::sqrt(SumOverRanks(channel, {bb})[0]);
  SolveReport report = RunnerOf(options.method)(system, options, scaled.data(), norm, x);
  double most_x = 0;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = std::ldexp(x[i], exponent);
    most_x = std::max(most_x, std::abs(x[i]));
  }
  if (MaxOverRanks(channel, {most_x})[0] > largest)
    Refuse(channel, std::string("the solution has numbers that ") + dtype + " cannot hold");
  return report;
}

}  // namespace gradred::sparse
