#include "sparse/operations.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>

#include "sparse/solve.h"

namespace gradred::sparse {
namespace {

using diff::Call;
using diff::Channel;
using diff::Dims;
using diff::Input;
using diff::Inputs;
using diff::Params;
using diff::Terms;
using diff::ToText;

struct Entry {
  PatternPtr pattern;
  int64_t made_at = 0;  // which of its context's operations has made it: tells patterns apart
  std::map<Params, std::unique_ptr<Solver>> solvers;  // by options; of the context's worker alone
};

struct Table {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::shared_ptr<Entry>> entries;
};

Table& TheTable() {
  static auto* table = new Table;  // outlives every thread
  return *table;
}

std::shared_ptr<Entry> FindEntry(int64_t number) {
  Table& table = TheTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto at = table.entries.find(number);
  if (at == table.entries.end())
    throw Error(Kind::kInvalidArgument, "sparse matrix: its pattern was given up");
  return at->second;
}

void Expect(const Input& x, int64_t count, const char* what) {
  if (x.shape.size() == 1 && x.count() == count) return;
  throw Error(Kind::kInvalidArgument, std::string("sparse matrix: ") + what + ": expected shape [" +
                                          std::to_string(count) + "], got " + ToText(x.shape));
}

DType DTypeOf(const Inputs& inputs) {
  const DType dtype = inputs.at(0).dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64)
    throw Error(Kind::kInvalidArgument,
                std::string("sparse matrix: expected float32 or float64, got ") + DTypeName(dtype));
  return dtype;
}

// body(T{}) with float or double.
template <class Body>
void ForReal(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32)
    body(float{});
  else
    body(double{});
}

// Params: limits of the row stripes, then of the column stripes. Inputs: rows and columns of the
// triplets. Outputs, of this rank: number of the pattern, entries, rows and columns; where each row
// starts; the global columns of the entries.
class MakePattern final : public diff::Operation {
 public:
  explicit MakePattern(const Params& params) {
    const auto middle = params.begin() + static_cast<int64_t>(params.size() / 2);
    rows_.begin.assign(params.begin(), middle);
    columns_.begin.assign(middle, params.end());
    text_ = ToText(params);
  }
  bool needs_numbers() const override { return true; }  // so that errors are agreed on
  Terms TermsOf(const Inputs& inputs, const Channel& channel) const override {
    const Input &rows = inputs.at(0), &columns = inputs.at(1);
    Expect(rows, rows.count(), "rows");
    Expect(columns, rows.count(), "columns");
    const std::string error =
        FindPatternError(rows_, columns_, channel.size(), rows.Int64s().data(),
                         columns.Int64s().data(), rows.count());
    if (!error.empty()) throw Error(Kind::kInvalidArgument, "sparse matrix: " + error);
    return {"pattern of a sparse matrix with stripes " + text_, {}};
  }
  void Run(Call& call, Channel& channel, const diff::Numbers&) override {
    const Input &rows = call.inputs()[0], &columns = call.inputs()[1];
    auto entry = std::make_shared<Entry>();
    entry->pattern = BuildPattern(channel, rows_, columns_, static_cast<const int64_t*>(rows.data),
                                  static_cast<const int64_t*>(columns.data), rows.count());
    entry->made_at = channel.place();
    const Pattern& p = *entry->pattern;
    auto* out = static_cast<int64_t*>(call.Output(0, {4}));
    auto* starts = static_cast<int64_t*>(call.Output(1, {p.rows() + 1}));
    std::copy(p.starts().begin(), p.starts().end(), starts);
    auto* global = static_cast<int64_t*>(call.Output(2, {p.nonzeros()}));
    for (const int32_t c : p.local_columns()) *global++ = p.GlobalColumn(c);
    Table& table = TheTable();
    std::lock_guard<std::mutex> lock(table.mutex);
    out[0] = table.next++;
    out[1] = p.nonzeros();
    out[2] = p.rows();
    out[3] = p.columns();
    table.entries.emplace(out[0], std::move(entry));
  }

 private:
  Stripes rows_, columns_;
  std::string text_;
};

std::string Of(DType dtype, const Entry& entry) {
  return std::string(" of ") + DTypeName(dtype) + " on the pattern of operation " +
         std::to_string(entry.made_at);
}

// An operation of a pattern; the first of its params is the number.
class OnPattern : public diff::Operation {
 public:
  explicit OnPattern(const Params& params) : number_(params.at(0)) {}

 protected:
  // Each time it runs: TensorFlow keeps operations that have run, and so would keep patterns.
  std::shared_ptr<Entry> Found() const { return FindEntry(number_); }

 private:
  const int64_t number_;
};

// Params: number, adjoint. Triplets to values, or back.
class AssembleOperation final : public OnPattern {
 public:
  explicit AssembleOperation(const Params& params)
      : OnPattern(params), adjoint_(params.at(1) != 0) {}
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const auto entry = Found();
    if (adjoint_)
      Expect(inputs.at(0), entry->pattern->nonzeros(), "values");
    else
      Expect(inputs.at(0), entry->pattern->triplets(), "values of the triplets");
    return {std::string(adjoint_ ? "adjoint of the " : "") + "assembly of a sparse matrix" +
                Of(DTypeOf(inputs), *entry),
            {}};
  }
  void Run(Call& call, Channel& channel, const diff::Numbers&) override {
    const Input& x = call.inputs()[0];
    const PatternPtr pattern = Found()->pattern;
    void* out = call.Output(0, {adjoint_ ? pattern->triplets() : pattern->nonzeros()});
    ForReal(x.dtype, [&](auto t) {
      using T = decltype(t);
      (adjoint_ ? AssembleAdjoint<T> : Assemble<T>)(*pattern, channel,
                                                    static_cast<const T*>(x.data),
                                                    static_cast<T*>(out));
    });
  }

 private:
  const bool adjoint_;
};

// Params: number, transposed. Inputs: values, x.
class ProductOperation final : public OnPattern {
 public:
  explicit ProductOperation(const Params& params)
      : OnPattern(params), transposed_(params.at(1) != 0) {}
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const auto entry = Found();
    const Pattern& pattern = *entry->pattern;
    Expect(inputs.at(0), pattern.nonzeros(), "values");
    Expect(inputs.at(1), transposed_ ? pattern.rows() : pattern.columns(), "vector");
    return {std::string("product of a ") + (transposed_ ? "transposed " : "") + "sparse matrix" +
                Of(DTypeOf(inputs), *entry),
            {}};
  }
  void Run(Call& call, Channel& channel, const diff::Numbers&) override {
    const Input &values = call.inputs()[0], &x = call.inputs()[1];
    const PatternPtr pattern = Found()->pattern;
    void* out = call.Output(0, {transposed_ ? pattern->columns() : pattern->rows()});
    ForReal(x.dtype, [&](auto t) {
      using T = decltype(t);
      Products<T> products(*pattern, channel);
      const auto* a = static_cast<const T*>(values.data);
      const auto* in = static_cast<const T*>(x.data);
      if (transposed_)
        products.MultiplyTransposed(a, in, static_cast<T*>(out));
      else
        products.Multiply(a, in, static_cast<T*>(out));
    });
  }

 private:
  const bool transposed_;
};

// Params: number. Inputs: y, x.
class OuterOperation final : public OnPattern {
 public:
  using OnPattern::OnPattern;
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const auto entry = Found();
    Expect(inputs.at(0), entry->pattern->rows(), "vector over the rows");
    Expect(inputs.at(1), entry->pattern->columns(), "vector over the columns");
    return {"outer product" + Of(DTypeOf(inputs), *entry), {}};
  }
  void Run(Call& call, Channel& channel, const diff::Numbers&) override {
    const Input &y = call.inputs()[0], &x = call.inputs()[1];
    const PatternPtr pattern = Found()->pattern;
    void* out = call.Output(0, {pattern->nonzeros()});
    ForReal(x.dtype, [&](auto t) {
      using T = decltype(t);
      Products<T>(*pattern, channel)
          .Outer(static_cast<const T*>(y.data), static_cast<const T*>(x.data),
                 static_cast<T*>(out));
    });
  }
};

double FromBits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Params: number, transposed; method, preconditioning, bits of rtol and atol, most iterations; then
// the bytes of the path of HYPRE. Inputs: values, b. Outputs: x; the residuals of the iterations,
// in float64.
class SolveOperation final : public OnPattern {
 public:
  explicit SolveOperation(const Params& params)
      : OnPattern(params), transposed_(params.at(1) != 0), key_(params.begin() + 2, params.end()) {
    options_.method = static_cast<Method>(params.at(2));
    options_.preconditioning = static_cast<Preconditioning>(params.at(3));
    options_.rtol = FromBits(params.at(4));
    options_.atol = FromBits(params.at(5));
    options_.max_iterations = params.at(6);
    options_.hypre_library.assign(params.begin() + 7, params.end());
    char tolerances[64];
    std::snprintf(tolerances, sizeof tolerances, "%g and %g", options_.rtol, options_.atol);
    text_ = std::string(MethodName(options_.method)) + " and " +
            PreconditioningName(options_.preconditioning) + ", tolerances " + tolerances +
            ", at most " + std::to_string(options_.max_iterations) + " iterations";
  }
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const auto entry = Found();
    Expect(inputs.at(0), entry->pattern->nonzeros(), "values");
    Expect(inputs.at(1), entry->pattern->rows(), "right-hand side");
    return {std::string("solve with a ") + (transposed_ ? "transposed " : "") + "sparse matrix" +
                Of(DTypeOf(inputs), *entry) + " by " + text_,
            {}};
  }
  void Run(Call& call, Channel& channel, const diff::Numbers&) override {
    const Input &values = call.inputs()[0], &b = call.inputs()[1];
    const auto entry = Found();
    const int64_t n = entry->pattern->rows();
    void* out = call.Output(0, {n});
    std::unique_ptr<Solver>& solver = entry->solvers[key_];
    if (solver == nullptr) solver = std::make_unique<Solver>(entry->pattern, options_);
    SolveReport report;
    if (b.dtype == DType::kFloat64) {
      report =
          solver->Solve(channel, static_cast<const double*>(values.data),
                        static_cast<const double*>(b.data), static_cast<double*>(out), transposed_);
    } else {  // in float64, so that sums of many do not spoil the iterates
      const auto* a = static_cast<const float*>(values.data);
      const auto* right = static_cast<const float*>(b.data);
      const std::vector<double> wide_a(a, a + entry->pattern->nonzeros()), wide_b(right, right + n);
      std::vector<double> x(wide_b.size());
      report = solver->Solve(channel, wide_a.data(), wide_b.data(), x.data(), transposed_,
                             "float32", std::numeric_limits<float>::max());
      for (int64_t i = 0; i < n; ++i) static_cast<float*>(out)[i] = static_cast<float>(x[i]);
    }
    const auto count = static_cast<int64_t>(report.residuals.size());
    std::memcpy(call.Output(1, {count}), report.residuals.data(), count * sizeof(double));
  }

 private:
  const bool transposed_;
  const Params key_;
  SolveOptions options_;
  std::string text_;
};

template <class Operation>
std::unique_ptr<diff::Operation> Make(const Params& params) {
  return std::make_unique<Operation>(params);
}

}  // namespace

const std::map<std::string, diff::MakeOperation>& Operations() {
  static const auto* operations = new std::map<std::string, diff::MakeOperation>{
      {"sparse_assemble", &Make<AssembleOperation>}, {"sparse_outer", &Make<OuterOperation>},
      {"sparse_pattern", &Make<MakePattern>},        {"sparse_product", &Make<ProductOperation>},
      {"sparse_solve", &Make<SolveOperation>},
  };
  return *operations;
}

std::vector<int> PeersOf(int64_t number) {
  std::vector<int> peers;
  for (const Pattern::Neighbour& n : FindEntry(number)->pattern->neighbours())
    peers.push_back(n.peer);
  return peers;
}

void DropPattern(int64_t number) {
  Table& table = TheTable();
  std::shared_ptr<Entry> dropped;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto at = table.entries.find(number);
  if (at == table.entries.end()) return;
  dropped = std::move(at->second);
  table.entries.erase(at);
}

}  // namespace gradred::sparse
