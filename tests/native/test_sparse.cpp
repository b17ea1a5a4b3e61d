// Distributed sparse matrices: assembly, products, solvers, against dense arithmetic, on loopback
// ranks.
#include <algorithm>
#include <cmath>
#include <random>

#include "channel_ranks.h"
#include "diff/operation.h"
#include "sparse/krylov.h"
#include "sparse/solve.h"
#include "testing.h"

using namespace gradred;
using sparse::PatternPtr;
using sparse::Stripes;
using testing::ChannelRank;
using Vector = std::vector<double>;

namespace {

struct Triplets {
  std::vector<int64_t> rows, columns;
  Vector values;
  void Add(int64_t row, int64_t column, double value) {
    rows.push_back(row);
    columns.push_back(column);
    values.push_back(value);
  }
};

// Uneven, one of them empty where there are many.
Stripes Cut(int64_t n, int ranks) {
  Stripes stripes;
  for (int r = 0; r <= ranks; ++r) stripes.begin.push_back(n * r * r / (ranks * ranks));
  if (ranks > 2) stripes.begin[1] = 0;
  return stripes;
}

PatternPtr Build(ChannelRank ranks, const Stripes& rows, const Stripes& columns,
                 const Triplets& t) {
  CHECK_EQ(sparse::FindPatternError(rows, columns, ranks.channel.size(), t.rows.data(),
                                    t.columns.data(), static_cast<int64_t>(t.rows.size())),
           "");
  return sparse::BuildPattern(ranks.channel, rows, columns, t.rows.data(), t.columns.data(),
                              static_cast<int64_t>(t.rows.size()));
}

Vector Values(ChannelRank ranks, const PatternPtr& pattern, const Triplets& t) {
  Vector values(pattern->nonzeros());
  sparse::Assemble(*pattern, ranks.channel, t.values.data(), values.data());
  return values;
}

Vector Own(const Vector& whole, const Stripes& stripes, int rank) {
  return {whole.begin() + stripes.begin[rank], whole.begin() + stripes.begin[rank + 1]};
}

void CheckVector(const Vector& got, const Vector& expected, const char* what) {
  testing::CheckEq(got.size(), expected.size(), what, __FILE__, __LINE__);
  for (size_t i = 0; i < got.size(); ++i)
    testing::CheckEq(got[i], expected[i], what, __FILE__, __LINE__);
}

// Small integers, so that all sums are exact.
struct Dense {
  Dense(int64_t rows, int64_t columns) : rows(rows), columns(columns), a(rows * columns) {}
  double& operator()(int64_t i, int64_t j) { return a[i * columns + j]; }
  int64_t rows, columns;
  Vector a;
};

// -u'' + drift u' on n points, as triplets of every rank-th element, so that rows belong to others.
Triplets Line(int64_t n, double drift, int rank, int size) {
  Triplets t;
  for (int64_t e = rank; e < n + 1; e += size) {  // element e joins the points e - 1 and e
    for (const int64_t i : {e - 1, e}) {
      for (const int64_t j : {e - 1, e}) {
        if (i < 0 || i >= n || j < 0 || j >= n) continue;
        t.Add(i, j, (i == j ? 1.0 : -1.0) + drift * (j == e ? 1 : -1));
      }
    }
  }
  return t;
}

double RelativeDistance(const Vector& a, const Vector& b) {
  double most = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
  }
  return most / scale;
}

// The whole solution of A u = b or A'u = b, and the residuals.
Vector SolveLine(int ranks, int64_t n, double drift, const sparse::SolveOptions& options,
                 bool transposed, Vector* residuals) {
  Vector whole(n);
  const Stripes stripes = Cut(n, ranks);
  testing::RunChannels(ranks, 2, [&](ChannelRank r) {
    const int rank = r.channel.rank();
    const Triplets t = Line(n, drift, rank, ranks);
    const PatternPtr pattern = Build(r, stripes, stripes, t);
    const Vector values = Values(r, pattern, t);
    Vector b, x(pattern->rows());
    for (int64_t i = stripes.begin[rank]; i < stripes.begin[rank + 1]; ++i)
      b.push_back(std::sin(0.3 * i) + 1);
    sparse::Solver solver(pattern, options);
    const auto report = solver.Solve(r.channel, values.data(), b.data(), x.data(), transposed);
    std::copy(x.begin(), x.end(), whole.begin() + stripes.begin[rank]);
    if (rank == 0) *residuals = report.residuals;
    // The true residual is what was promised.
    Vector ax(x.size());
    sparse::Products<double> products(*pattern, r.channel);
    if (transposed)
      products.MultiplyTransposed(values.data(), x.data(), ax.data());
    else
      products.Multiply(values.data(), x.data(), ax.data());
    double rr = 0, bb = 0;
    for (size_t i = 0; i < b.size(); ++i) {
      rr += (b[i] - ax[i]) * (b[i] - ax[i]);
      bb += b[i] * b[i];
    }
    const Vector sums = sparse::SumOverRanks(r.channel, {rr, bb});
    CHECK(std::sqrt(sums[0] / sums[1]) <= options.rtol);
  });
  return whole;
}

}  // namespace

// Rectangular, duplicates, rows of other ranks, empty stripes: exact.
TEST(ProductsAreThoseOfTheDenseMatrix) {
  const uint64_t seed = std::random_device{}();
  for (const int size : {1, 2, 3, 4, 5}) {
    for (uint64_t round = 0; round < 6; ++round) {
      std::mt19937_64 random(seed + round);
      const auto pick = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
      };
      const int64_t m = pick(1, 20), n = pick(1, 20);
      Dense dense(m, n), has(m, n);
      std::vector<Triplets> triplets(size);
      for (int64_t k = pick(0, 60); k > 0; --k) {
        const int64_t i = pick(0, m - 1), j = pick(0, n - 1), value = pick(-3, 3);
        triplets[pick(0, size - 1)].Add(i, j, static_cast<double>(value));
        dense(i, j) += static_cast<double>(value);
        has(i, j) = 1;
      }
      Vector x(n), y(m), ax(m), aty(n);
      for (double& v : x) v = static_cast<double>(pick(-4, 4));
      for (double& v : y) v = static_cast<double>(pick(-4, 4));
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          ax[i] += dense(i, j) * x[j];
          aty[j] += dense(i, j) * y[i];
        }
      }
      const Stripes rows = Cut(m, size), columns = Cut(n, size);
      testing::RunChannels(size, static_cast<int>(round), [&](ChannelRank ranks) {
        const int rank = ranks.channel.rank();
        const std::string what = "seed " + std::to_string(seed);
        const Triplets& t = triplets[rank];
        const PatternPtr p = Build(ranks, rows, columns, t);
        const Vector values = Values(ranks, p, t);
        const Vector own_x = Own(x, columns, rank), own_y = Own(y, rows, rank);
        sparse::Products<double> products(*p, ranks.channel);
        Vector out(p->rows()), back(p->columns()), outer(p->nonzeros());
        products.Multiply(values.data(), own_x.data(), out.data());
        CheckVector(out, Own(ax, rows, rank), what.c_str());
        products.MultiplyTransposed(values.data(), own_y.data(), back.data());
        CheckVector(back, Own(aty, columns, rank), what.c_str());
        products.Outer(own_y.data(), own_x.data(), outer.data());
        Vector entries;
        for (int64_t i = 0; i < p->rows(); ++i) {
          for (int64_t k = p->starts()[i]; k < p->starts()[i + 1]; ++k) {
            const int64_t j = p->GlobalColumn(p->local_columns()[k]);
            CHECK_EQ(has(p->first_row() + i, j), 1);
            CHECK_EQ(values[k], dense(p->first_row() + i, j));
            CHECK_EQ(outer[k], own_y[i] * x[j]);
            if (k > p->starts()[i]) CHECK(j > p->GlobalColumn(p->local_columns()[k - 1]));
          }
        }
        Vector spread(t.values.size());
        sparse::AssembleAdjoint(*p, ranks.channel, values.data(), spread.data());
        for (size_t k = 0; k < spread.size(); ++k)
          CHECK_EQ(spread[k], dense(t.rows[k], t.columns[k]));
        // In float32 too.
        const std::vector<float> narrow(values.begin(), values.end());
        const std::vector<float> narrow_x(own_x.begin(), own_x.end());
        std::vector<float> narrow_out(out.size());
        sparse::Products<float>(*p, ranks.channel)
            .Multiply(narrow.data(), narrow_x.data(), narrow_out.data());
        CheckVector(Vector(narrow_out.begin(), narrow_out.end()), out, what.c_str());
      });
    }
  }
}

TEST(SolversConvergeAlikeOnAnyNumberOfRanks) {
  for (const auto method :
       {sparse::Method::kCg, sparse::Method::kBicgstab, sparse::Method::kGmres}) {
    for (const auto preconditioning :
         {sparse::Preconditioning::kNone, sparse::Preconditioning::kJacobi}) {
      for (const bool transposed : {false, true}) {
        const double drift = method == sparse::Method::kCg ? 0 : 0.2;
        sparse::SolveOptions options{method, preconditioning, 1e-12, 0, 2000, ""};
        Vector alone_residuals, residuals;
        const Vector alone = SolveLine(1, 40, drift, options, transposed, &alone_residuals);
        for (const int ranks : {2, 3, 4}) {
          const Vector u = SolveLine(ranks, 40, drift, options, transposed, &residuals);
          // The matrix has a condition of about 700, so 1e-12 of the residual leaves 1e-9.
          CHECK(RelativeDistance(u, alone) < 1e-9);
          // The same iterates but for rounding, which has not grown much yet.
          for (size_t i = 0; i < 8; ++i)
            CHECK(std::abs(residuals[i] - alone_residuals[i]) < 1e-9 * alone_residuals[i]);
        }
      }
    }
  }
}

// The same bits but for the power of two, where squares would vanish, overflow or be rounded away.
TEST(SizesOfRightHandSidesDoNotMatter) {
  testing::RunChannels(2, 0, [&](ChannelRank ranks) {
    const Stripes stripes{{0, 20, 40}};
    const Triplets t = Line(40, 0.2, ranks.channel.rank(), 2);
    const PatternPtr pattern = Build(ranks, stripes, stripes, t);
    const Vector values = Values(ranks, pattern, t);
    for (const auto method : {sparse::Method::kBicgstab, sparse::Method::kGmres}) {
      const auto solve = [&](double size) {
        Vector x(pattern->rows());
        sparse::Solver(pattern, {method, sparse::Preconditioning::kJacobi, 1e-10, 0, 1000, ""})
            .Solve(ranks.channel, values.data(), Vector(pattern->rows(), size).data(), x.data(),
                   false);
        return x;
      };
      const Vector one = solve(1);
      for (const int exponent : {-900, -600, 600, 1000}) {
        const Vector x = solve(std::ldexp(1.0, exponent));
        for (size_t i = 0; i < x.size(); ++i) CHECK_EQ(x[i], std::ldexp(one[i], exponent));
      }
    }
  });
}

TEST(SolutionsThatNoNumberCanHoldAreErrors) {
  testing::RunChannels(2, 0, [&](ChannelRank ranks) {
    const Stripes stripes{{0, 20, 40}};
    const Triplets t = Line(40, 0, ranks.channel.rank(), 2);
    const PatternPtr pattern = Build(ranks, stripes, stripes, t);
    const Vector values = Values(ranks, pattern, t);
    const auto solve = [&](int of_matrix, int of_right, double largest) {
      Vector a = values, x(pattern->rows());
      for (double& value : a) value = std::ldexp(value, of_matrix);
      sparse::Solver(pattern, {})
          .Solve(ranks.channel, a.data(), Vector(x.size(), std::ldexp(1.0, of_right)).data(),
                 x.data(), false, "float16", largest);
      return x;
    };
    constexpr double kLargest = std::numeric_limits<double>::max();
    const Vector one = solve(0, 0, kLargest), same = solve(600, 600, kLargest);
    for (size_t i = 0; i < one.size(); ++i) CHECK_EQ(same[i], one[i]);
    for (const auto& [of_matrix, of_right, largest] :
         {std::tuple{-600, 600, kLargest}, {0, 1022, kLargest}, {0, 0, 200.0}}) {
      std::string text;
      try {
        solve(of_matrix, of_right, largest);
      } catch (const diff::AgreedError& error) {
        text = error.what();
      }
      CHECK_EQ(text, "solve in context 'test': the solution has numbers that float16 cannot hold");
    }
  });
}

// Two sums and one product an iteration for cg; three sums and two products for bicgstab.
TEST(MessagesAnIteration) {
  for (const auto& [method, products] :
       {std::pair{sparse::Method::kCg, 1}, {sparse::Method::kBicgstab, 2}}) {
    testing::RunChannels(2, 0, [&, method = method, products = products](ChannelRank ranks) {
      const int rank = ranks.channel.rank();
      const Stripes stripes{{0, 20, 40}};
      const Triplets t = Line(40, 0, rank, 2);
      const PatternPtr pattern = Build(ranks, stripes, stripes, t);
      const Vector values = Values(ranks, pattern, t), b(pattern->rows(), 1);
      Vector x(pattern->rows());
      sparse::Solver solver(pattern, {method, sparse::Preconditioning::kJacobi, 1e-8, 0, 1000, ""});
      const int before = ranks.messages.sends();
      const auto report = solver.Solve(ranks.channel, values.data(), b.data(), x.data(), false);
      // One neighbour; the last product checks the residual.
      CHECK_EQ(ranks.messages.sends() - before,
               static_cast<int>(products * report.iterations()) + 1);
    });
  }
}

TEST(SetUpIsKeptWhileTheValuesAre) {
  testing::RunChannels(2, 0, [&](ChannelRank ranks) {
    const Stripes stripes{{0, 5, 10}};
    const Triplets t = Line(10, 0, ranks.channel.rank(), 2);
    const PatternPtr pattern = Build(ranks, stripes, stripes, t);
    Vector values = Values(ranks, pattern, t), b(5, 1), x(5);
    sparse::Solver solver(pattern, {});
    for (const bool transposed : {false, true, false}) {
      solver.Solve(ranks.channel, values.data(), b.data(), x.data(), transposed);
      CHECK_EQ(solver.setups(), 1);
    }
    if (ranks.channel.rank() == 1) values[pattern->diagonal()[0]] += 1;  // a change for all
    solver.Solve(ranks.channel, values.data(), b.data(), x.data(), false);
    CHECK_EQ(solver.setups(), 2);
    solver.Solve(ranks.channel, values.data(), Vector(5, 0).data(), x.data(), false);
    CHECK_EQ(x[2], 0);
  });
}

TEST(FailuresAreErrorsOnAllRanks) {
  const auto solve = [](ChannelRank ranks, const Triplets& t, sparse::SolveOptions options,
                        double right) {
    const Stripes stripes{{0, 6, 12}};
    const PatternPtr pattern = Build(ranks, stripes, stripes, t);
    const Vector values = Values(ranks, pattern, t), b(pattern->rows(), right);
    Vector x(pattern->rows());
    sparse::Solver(pattern, options).Solve(ranks.channel, values.data(), b.data(), x.data(), false);
  };
  std::string texts[2];
  testing::RunChannels(2, 0, [&](ChannelRank ranks) {
    const int rank = ranks.channel.rank();
    const Triplets line = Line(12, 0, rank, 2);
    sparse::SolveOptions options;
    options.max_iterations = 3;
    CHECK_ERROR(solve(ranks, line, options, 1), Kind::kInvalidArgument,
                "cg with jacobi has not converged after 3 iterations");
    try {
      solve(ranks, line, options, 1);
    } catch (const diff::AgreedError& error) {
      texts[rank] = error.what();
    }
    CHECK_ERROR(solve(ranks, line, {}, INFINITY), Kind::kInvalidArgument,
                "right-hand side: expected finite numbers");

    Triplets hole = line;
    for (double& value : hole.values) value *= rank == 0 ? 1 : -1;
    CHECK_ERROR(solve(ranks, hole, {}, 1), Kind::kInvalidArgument,
                "jacobi: expected a diagonal entry that is not zero, got none in row ");
    Triplets negative = line;
    for (double& value : negative.values) value = -value;
    CHECK_ERROR(solve(ranks, negative, {}, 1), Kind::kInvalidArgument,
                "not symmetric positive definite");
    // Singular: constants are in its kernel, and the right-hand side is not in its range.
    Triplets ring;
    for (int64_t i = 6 * rank; i < 6 * rank + 6; ++i) {
      ring.Add(i, i, 2);
      ring.Add(i, (i + 1) % 12, -1);
      ring.Add(i, (i + 11) % 12, -1);
    }
    for (const auto method :
         {sparse::Method::kCg, sparse::Method::kBicgstab, sparse::Method::kGmres}) {
      sparse::SolveOptions some;
      some.method = method;
      some.max_iterations = 50;
      CHECK_ERROR(solve(ranks, ring, some, 1), Kind::kInvalidArgument, "solve in context 'test'");
    }
  });
  CHECK_EQ(texts[0], texts[1]);
  CHECK(texts[0].find("residuals: 1 ") != std::string::npos);

  const auto error = [](Stripes rows, Stripes columns, Triplets t) {
    return sparse::FindPatternError(rows, columns, 2, t.rows.data(), t.columns.data(),
                                    static_cast<int64_t>(t.rows.size()));
  };
  CHECK_EQ(error({{0, 3}}, {{0, 1, 3}}, {}), "row stripes: expected 3 limits, got 2");
  CHECK_EQ(error({{0, 1, 3}}, {{0, 4, 3}}, {}),
           "column stripes: expected limits from 0 on that do not descend");
  CHECK_EQ(error({{0, 1, 3}}, {{0, 2, 4}}, {{0, 2}, {0, 4}, {}}),
           "triplet 1: expected a row below 3 and a column below 4, got (2, 4)");
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
