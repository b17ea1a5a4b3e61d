// How fast the loops under pack, sum and unpack move bytes, against memcpy of as many bytes.
//   kernels [filter]     rows whose text contains `filter`
// Bytes are those read plus those written. A row's time is the median of rounds in which the loop
// and memcpy take turns.
#include "reduce/kernels.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "reduce/convert.h"
#include "reduce/layout.h"

using namespace gradred;
using namespace gradred::reduce;

namespace {

constexpr int kRounds = 21;
constexpr double kRoundUs = 400;  // of each side, at least

double NowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

double TimeUs(const std::function<void()>& run, int repeats) {
  const double start = NowUs();
  for (int i = 0; i < repeats; ++i) run();
  return (NowUs() - start) / repeats;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

class Table {
 public:
  explicit Table(const char* filter) : filter_(filter) {
    std::printf("%-14s %-20s %3s %10s %8s %8s %6s\n", "kernel", "dtype", "n", "bytes", "GB/s",
                "memcpy", "ratio");
  }

  // `nbytes`: read and written by one `run`.
  void Row(const std::string& kernel, const std::string& dtype, int n, int64_t nbytes,
           const std::function<void()>& run) {
    char label[64];
    std::snprintf(label, sizeof label, "%-14s %-20s %3d %10lld", kernel.c_str(), dtype.c_str(), n,
                  static_cast<long long>(nbytes));
    if (!std::strstr(label, filter_)) return;
    const size_t half = static_cast<size_t>(nbytes / 2);
    from_.resize(half), to_.resize(half);
    const auto copy = [&] { std::memcpy(to_.data(), from_.data(), half); };
    const int repeats = static_cast<int>(kRoundUs / (TimeUs(run, 1) + 0.01)) + 1;
    std::vector<double> mine, theirs;
    for (int i = 0; i < kRounds; ++i) {
      mine.push_back(TimeUs(run, repeats));
      theirs.push_back(TimeUs(copy, repeats));
    }
    const double gbps = nbytes / Median(mine) / 1e3, memcpy_gbps = nbytes / Median(theirs) / 1e3;
    std::printf("%s %8.1f %8.1f %6.2f\n", label, gbps, memcpy_gbps, gbps / memcpy_gbps);
    std::fflush(stdout);
  }

 private:
  const char* filter_;
  std::vector<char> from_, to_;
};

// Memory with values that are finite in every dtype.
std::vector<char> Buffer(int64_t nbytes) {
  return std::vector<char>(static_cast<size_t>(nbytes), 0x3f);
}

void Converts(Table& table, int64_t nbytes) {
  struct Pair {
    DType from, to;
    double scale;
  };
  const DType f32 = DType::kFloat32, f64 = DType::kFloat64;
  const DType f16 = DType::kFloat16, b16 = DType::kBfloat16;
  for (const Pair& p : {Pair{f32, f32, 1}, Pair{f64, f64, 1}, Pair{f16, f16, 1}, Pair{b16, b16, 1},
                        Pair{f32, f32, 0.5}, Pair{f64, f64, 0.5}, Pair{f16, f16, 0.5},
                        Pair{b16, b16, 0.5}, Pair{f32, f16, 0.5}, Pair{f32, b16, 0.5},
                        Pair{f16, f32, 0.5}, Pair{b16, f32, 0.5}, Pair{f64, f32, 0.5}}) {
    // As many elements as read and write `nbytes`.
    const int64_t count = nbytes / (DTypeSize(p.from) + DTypeSize(p.to));
    std::vector<char> src = Buffer(count * DTypeSize(p.from));
    std::vector<char> dst = Buffer(count * DTypeSize(p.to));
    std::string dtype = DTypeName(p.from);
    if (p.from != p.to) dtype += std::string("-") + DTypeName(p.to);
    const std::string kernel = p.scale == 1 ? "copy" : "scale";
    table.Row(kernel, dtype, 1, nbytes,
              [&] { Convert(dst.data(), p.to, src.data(), p.from, count, p.scale, nullptr); });
    ConvertCounts counts;
    table.Row(kernel + " + count", dtype, 1, nbytes,
              [&] { Convert(dst.data(), p.to, src.data(), p.from, count, p.scale, &counts); });
    table.Row(kernel + " + stream", dtype, 1, nbytes, [&] {
      Convert(dst.data(), p.to, src.data(), p.from, count, p.scale, nullptr, Stores::kStreamed);
    });
    if (counts.non_finite + counts.saturated != 0) std::printf("wrong count\n");
  }
}

void Sums(Table& table, int64_t nbytes) {
  for (int n : {2, 3, 4, 8}) {
    const int64_t each = nbytes / (n + 1) / kAlign * kAlign;  // n read, one written
    std::vector<std::vector<char>> data;
    std::vector<const void*> ins;
    for (int i = 0; i < n; ++i) data.push_back(Buffer(each));
    for (const auto& in : data) ins.push_back(in.data());
    std::vector<char> out = Buffer(each);
    const auto row = [&](DType d, ReduceOp op) {
      const Layout layout({{0, each / DTypeSize(d), d, op}});
      table.Row(ReduceOpName(op), DTypeName(d), n, each * (n + 1),
                [&] { layout.ReduceNode(out.data(), ins.data(), n, {0, layout.nbytes()}, 0.25f); });
    };
    for (DType d : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16,
                    DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64, DType::kBool})
      row(d, ReduceOp::kSum);
    for (DType d : {DType::kFloat16, DType::kBfloat16}) row(d, ReduceOp::kAverage);
    row(DType::kFloat32, ReduceOp::kMax);
    row(DType::kFloat32, ReduceOp::kProduct);
    row(DType::kInt64, ReduceOp::kProduct);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("instruction set: %s\n", BestLoops().name);
  Table table(argc > 1 ? argv[1] : "");
  for (int64_t nbytes : {int64_t{256} << 10, int64_t{64} << 20}) {
    Converts(table, nbytes);
    Sums(table, nbytes);
  }
  return 0;
}
