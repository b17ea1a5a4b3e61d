// Halo exchange and its adjoint against a direct index computation, on loopback ranks.
#include <cmath>
#include <numeric>
#include <random>

#include "channel_ranks.h"
#include "diff/halo.h"
#include "reduce/convert.h"
#include "testing.h"

using namespace gradred;
using diff::Boundary;
using diff::FieldType;
using diff::HaloGrid;
using diff::HaloPlan;

namespace {

using Values = std::vector<double>;

// The plain rules, on whole arrays of float64.
class Reference {
 public:
  explicit Reference(HaloGrid grid) : grid_(std::move(grid)) {
    grid_.dimensions.insert(grid_.dimensions.begin(), 3 - grid_.dimensions.size(), {{1}, {}, {}});
    for (const auto& d : grid_.dimensions)
      shape_.push_back(std::accumulate(d.blocks.begin(), d.blocks.end(), int64_t{0}));
  }
  int64_t points() const { return shape_[0] * shape_[1] * shape_[2]; }

  // visit(point of the padded block, point of the whole array, -1: the constant, or -2: zero)
  template <class Visit>
  void ForEachPadded(int rank, const Visit& visit) const {
    int64_t begin[3], end[3];
    for (int d = 2, rest = rank; d >= 0; --d) {
      const auto& dimension = grid_.dimensions[d];
      const int c = rest % static_cast<int>(dimension.blocks.size());
      rest /= static_cast<int>(dimension.blocks.size());
      const int64_t first =
          std::accumulate(dimension.blocks.begin(), dimension.blocks.begin() + c, int64_t{0});
      begin[d] = first - dimension.widths[0];
      end[d] = first + dimension.blocks[c] + dimension.widths[1];
    }
    int64_t at = 0, i[3];
    for (i[0] = begin[0]; i[0] < end[0]; ++i[0]) {
      for (i[1] = begin[1]; i[1] < end[1]; ++i[1]) {
        for (i[2] = begin[2]; i[2] < end[2]; ++i[2]) {
          int64_t whole = 0;
          int ghost_sides = 0;
          for (int d = 0; d < 3; ++d) {
            const auto& widths = grid_.dimensions[d].widths;
            ghost_sides += i[d] < begin[d] + widths[0] || i[d] >= end[d] - widths[1];
            const int64_t source = Source(d, i[d]);
            whole = whole < 0 || source < 0 ? -1 : whole * shape_[d] + source;
          }
          visit(at++, ghost_sides > 1 && !grid_.corners ? -2 : whole);
        }
      }
    }
  }

  template <class Visit>
  void ForEachInterior(int rank, const Visit& visit) const {
    HaloGrid bare = grid_;
    for (auto& d : bare.dimensions) d.widths = {};
    Reference(bare).ForEachPadded(rank, visit);
  }

 private:
  int64_t Source(int d, int64_t i) const {
    const int64_t n = shape_[d];
    if (i >= 0 && i < n) return i;
    switch (grid_.dimensions[d].boundaries[i < 0 ? 0 : 1]) {
      case Boundary::kPeriodic:
        return (i + n) % n;
      case Boundary::kReflect:
        return i < 0 ? -i : 2 * n - 2 - i;
      case Boundary::kSymmetric:
        return i < 0 ? -i - 1 : 2 * n - 1 - i;
      case Boundary::kConstant:
        break;
    }
    return -1;
  }

  HaloGrid grid_;
  std::vector<int64_t> shape_;
};

// A field of one rank: element (outer, point, inner) <-> float64.
struct Array {
  Array(FieldType type, int64_t points)
      : type(type), points(points), bytes(type.nbytes(points) + 8, '\x55') {}
  double Get(int64_t o, int64_t point, int64_t i) const {
    double value;
    reduce::Convert(&value, DType::kFloat64, bytes.data() + At(o, point, i), type.dtype, 1, 1,
                    nullptr);
    return value;
  }
  void Set(int64_t o, int64_t point, int64_t i, double value) {
    reduce::Convert(bytes.data() + At(o, point, i), type.dtype, &value, DType::kFloat64, 1, 1,
                    nullptr);
  }
  int64_t At(int64_t o, int64_t point, int64_t i) const {
    return ((o * points + point) * type.inner + i) * DTypeSize(type.dtype);
  }
  template <class Body>
  void ForEachChannel(const Body& body) const {
    for (int64_t o = 0; o < type.outer; ++o)
      for (int64_t i = 0; i < type.inner; ++i) body(o, i);
  }
  FieldType type;
  int64_t points;
  std::string bytes;
};

double Small(uint64_t a, uint64_t b, uint64_t c) {  // sums of many stay exact in bfloat16
  return static_cast<double>((a * 2654435761u + b * 40503u + c * 97u) >> 3 & 3);
}

// Exact values of forward and adjoint, in place and not, of all fields, and the count of messages.
void CheckGrid(const HaloGrid& grid, const std::vector<FieldType>& fields, int delay,
               const std::string& what) {
  const int size = grid.ranks();
  const Reference reference(grid);
  // What the adjoint must give: [field][channel][point of the whole array].
  std::vector<std::vector<Values>> expected(fields.size());
  for (size_t f = 0; f < fields.size(); ++f) {
    expected[f].assign(fields[f].outer * fields[f].inner, Values(reference.points()));
    for (size_t channel = 0; channel < expected[f].size(); ++channel) {
      for (int rank = 0; rank < size; ++rank) {
        reference.ForEachPadded(rank, [&](int64_t at, int64_t whole) {
          if (whole >= 0) expected[f][channel][whole] += Small(at, rank, f * 7 + channel);
        });
      }
    }
  }
  testing::RunChannels(size, delay, [&](testing::ChannelRank ranks) {
    const int rank = ranks.channel.rank();
    const HaloPlan plan(grid, rank);
    const int64_t points = diff::Points(plan.interior()), padded = diff::Points(plan.padded());
    std::vector<Array> in, out, cotangents, back;
    for (size_t f = 0; f < fields.size(); ++f) {
      in.emplace_back(fields[f], points);
      back.emplace_back(fields[f], points);
      out.emplace_back(fields[f], padded);
      cotangents.emplace_back(fields[f], padded);
      in[f].ForEachChannel([&](int64_t o, int64_t i) {
        const int64_t channel = o * fields[f].inner + i;
        reference.ForEachInterior(rank, [&](int64_t at, int64_t whole) {
          in[f].Set(o, at, i, Small(whole, f, channel));
        });
        for (int64_t at = 0; at < padded; ++at)
          cotangents[f].Set(o, at, i, Small(at, rank, f * 7 + channel));
      });
    }
    const auto of = [](std::vector<Array>* arrays) {
      std::vector<void*> pointers;
      for (Array& array : *arrays) pointers.push_back(array.bytes.data());
      return pointers;
    };
    const auto constant = [&](std::vector<void*> pointers) {
      return std::vector<const void*>(pointers.begin(), pointers.end());
    };
    const auto exchange = [&](const std::vector<void*>& arrays, bool adjoint) {
      diff::HaloExchange exchange(plan, ranks.channel, fields, adjoint);
      for (int times = 0; times < 2; ++times) {  // the second changes nothing
        exchange.Start(arrays);
        exchange.Finish();
      }
    };
    const auto check_out = [&] {
      for (size_t f = 0; f < fields.size(); ++f) {
        out[f].ForEachChannel([&](int64_t o, int64_t i) {
          const int64_t channel = o * fields[f].inner + i;
          reference.ForEachPadded(rank, [&](int64_t at, int64_t whole) {
            const double right = whole == -2 ? 0
                                 : whole < 0 ? grid.constant
                                             : Small(whole, f, channel);
            testing::CheckEq(out[f].Get(o, at, i), right, what.c_str(), __FILE__, __LINE__);
          });
        });
      }
    };
    HaloForward(plan, ranks.channel, fields, constant(of(&in)), of(&out));
    check_out();
    const int forward = static_cast<int>(plan.Traffic(fields, false).peers.size());
    const int adjoint = static_cast<int>(plan.Traffic(fields, true).peers.size());
    testing::CheckEq(ranks.messages.sends(), forward, what.c_str(), __FILE__, __LINE__);
    exchange(of(&out), false);
    check_out();

    HaloAdjoint(plan, ranks.channel, fields, constant(of(&cotangents)), of(&back));
    exchange(of(&cotangents), true);
    CHECK_EQ(ranks.messages.sends(), 3 * forward + 3 * adjoint);
    for (size_t f = 0; f < fields.size(); ++f) {
      back[f].ForEachChannel([&](int64_t o, int64_t i) {
        const int64_t channel = o * fields[f].inner + i;
        reference.ForEachInterior(rank, [&](int64_t at, int64_t whole) {
          testing::CheckEq(back[f].Get(o, at, i), expected[f][channel][whole], what.c_str(),
                           __FILE__, __LINE__);
        });
        double sum = 0, sum_in_place = 0;  // the in-place array: the same interior, ghosts zero
        for (int64_t at = 0; at < points; ++at) sum += back[f].Get(o, at, i);
        for (int64_t at = 0; at < padded; ++at) sum_in_place += cotangents[f].Get(o, at, i);
        testing::CheckEq(sum_in_place, sum, what.c_str(), __FILE__, __LINE__);
      });
    }
  });
}

HaloGrid::Dimension Dimension(std::vector<int64_t> blocks, int64_t low, int64_t high,
                              Boundary below, Boundary above) {
  return {std::move(blocks), {low, high}, {below, above}};
}

std::string Describe(const HaloGrid& grid) {
  std::string text = grid.corners ? "corners" : "no corners";
  for (const auto& d : grid.dimensions) {
    text += "; blocks";
    for (const int64_t block : d.blocks) text += " " + std::to_string(block);
    text += " widths " + std::to_string(d.widths[0]) + " " + std::to_string(d.widths[1]) + " " +
            BoundaryName(d.boundaries[0]) + " " + BoundaryName(d.boundaries[1]);
  }
  return text;
}

}  // namespace

TEST(EveryBoundaryInOneDimension) {
  for (const Boundary b :
       {Boundary::kPeriodic, Boundary::kConstant, Boundary::kReflect, Boundary::kSymmetric}) {
    for (const std::vector<int64_t>& blocks :
         {std::vector<int64_t>{4}, {4, 3}, {3, 5, 4}, {3, 4, 3, 3, 5}}) {
      for (const auto& [low, high] : {std::pair<int64_t, int64_t>{1, 1}, {2, 0}, {0, 2}, {2, 1}}) {
        HaloGrid grid{{Dimension(blocks, low, high, b, b)}, 3, true};
        CheckGrid(grid, {{DType::kFloat64, 1, 1}}, 0, Describe(grid));
      }
    }
  }
}

TEST(FieldsOfSeveralTypesShareMessages) {
  HaloGrid grid{{Dimension({3, 4}, 2, 1, Boundary::kPeriodic, Boundary::kPeriodic),
                 Dimension({5, 4}, 1, 2, Boundary::kReflect, Boundary::kConstant)},
                2,
                true};
  CheckGrid(grid,
            {{DType::kFloat16, 3, 1},
             {DType::kFloat64, 1, 2},
             {DType::kBfloat16, 1, 3},
             {DType::kFloat32, 2, 2}},
            3, "fields");
  const HaloPlan plan(grid, 0);
  // One to the other rank of the first dimension, both ways in it; one to that of the second.
  CHECK_EQ(plan.Traffic({{}, {}, {}}, false).peers.size(), 2u);
}

TEST(RandomGrids) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int done = 0;
  while (done < 400) {
    HaloGrid grid;
    grid.constant = static_cast<double>(pick(0, 5));
    grid.corners = pick(0, 2) > 0;
    const int64_t dimensions = pick(1, 3);
    for (int64_t d = 0; d < dimensions; ++d) {
      std::vector<int64_t> blocks(pick(1, 3));
      for (int64_t& block : blocks) block = pick(1, 5);
      auto below = static_cast<Boundary>(pick(0, 3)), above = static_cast<Boundary>(pick(1, 3));
      if (below == Boundary::kPeriodic) above = below;
      grid.dimensions.push_back(Dimension(blocks, pick(0, 3), pick(0, 3), below, above));
    }
    if (grid.ranks() > 8) continue;
    std::vector<FieldType> fields(pick(1, 3));
    for (FieldType& field : fields) {
      constexpr DType kTypes[] = {DType::kFloat16, DType::kBfloat16, DType::kFloat32,
                                  DType::kFloat64};
      field = {kTypes[pick(0, 3)], pick(1, 2), pick(1, 3)};
    }
    try {
      const HaloPlan fits(grid, 0);
    } catch (const Error&) {
      continue;  // a width that does not fit
    }
    CheckGrid(grid, fields, static_cast<int>(pick(0, 3)),
              "seed " + std::to_string(seed) + ": " + Describe(grid));
    ++done;
  }
}

// <Fx, y> = <x, F'y> over all ranks, on values that are no integers: 1e-14 is some 50 roundings of
// terms of size one, in sums of a few hundred of them.
TEST(AdjointByDotProduct) {
  HaloGrid grid{{Dimension({4, 5}, 2, 3, Boundary::kSymmetric, Boundary::kReflect),
                 Dimension({3, 4, 3}, 3, 1, Boundary::kPeriodic, Boundary::kPeriodic)},
                0,
                true};
  std::vector<double> left(6), right(6);
  testing::RunChannels(6, 0, [&](testing::ChannelRank ranks) {
    const int rank = ranks.channel.rank();
    const HaloPlan plan(grid, rank);
    std::mt19937_64 random(rank);
    std::uniform_real_distribution<double> uniform(-1, 1);
    Values x(diff::Points(plan.interior())), y(diff::Points(plan.padded()));
    for (double& v : x) v = uniform(random);
    for (double& v : y) v = uniform(random);
    Values fx(y.size()), fty(x.size());
    const std::vector<FieldType> field(1);
    HaloForward(plan, ranks.channel, field, {x.data()}, {fx.data()});
    HaloAdjoint(plan, ranks.channel, field, {y.data()}, {fty.data()});
    left[rank] = std::inner_product(fx.begin(), fx.end(), y.begin(), 0.0);
    right[rank] = std::inner_product(x.begin(), x.end(), fty.begin(), 0.0);
  });
  const double l = std::accumulate(left.begin(), left.end(), 0.0);
  const double r = std::accumulate(right.begin(), right.end(), 0.0);
  CHECK(std::abs(l - r) < 1e-14 * 100);
}

TEST(WhatDoesNotFitIsNamed) {
  const auto constant = Boundary::kConstant;
  const HaloGrid wide{{Dimension({4, 2, 4}, 3, 1, constant, constant)}, 0, true};
  for (const int rank : {0, 1, 2}) {
    CHECK_ERROR(HaloPlan(wide, rank), Kind::kInvalidArgument,
                "halo exchange: dimension 0: layers of block 1 of 3, with ghost layers of widths 3 "
                "and 1: expected 3 or more, got 2");
  }
  const HaloGrid mirror{{Dimension({2}, 2, 0, Boundary::kReflect, constant)}, 0, true};
  CHECK_ERROR(HaloPlan(mirror, 0), Kind::kInvalidArgument, "expected 3 or more, got 2");
  const HaloGrid half{{Dimension({2}, 1, 1, Boundary::kPeriodic, constant)}, 0, true};
  CHECK_ERROR(HaloPlan(half, 0), Kind::kInvalidArgument, "periodic on both sides or on none");
  const HaloGrid grid{{Dimension({2, 2}, 1, 1, constant, constant)}, 0, true};
  CHECK_ERROR(HaloPlan(grid, 2), Kind::kInvalidArgument, "rank: expected less than 2, got 2");
  CHECK_ERROR(HaloPlan({}, 0), Kind::kInvalidArgument, "dimensions: expected 1 to 3, got 0");
  const HaloGrid empty{{Dimension({2, 0}, 0, 0, constant, constant)}, 0, true};
  CHECK_ERROR(HaloPlan(empty, 0), Kind::kInvalidArgument, "expected 1 or more");
  testing::RunChannels(1, 0, [&](testing::ChannelRank ranks) {
    CHECK_ERROR(diff::HaloExchange(HaloPlan(grid, 0), ranks.channel, {{}}, false),
                Kind::kInvalidArgument, "ranks of the grid: expected 1, got 2");
    const HaloPlan plan({{Dimension({2}, 1, 1, constant, constant)}, 0, true}, 0);
    CHECK_ERROR(diff::HaloExchange(plan, ranks.channel, {{DType::kInt32, 1, 1}}, false),
                Kind::kInvalidArgument, "expected a floating one, got int32");
    CHECK_ERROR(diff::HaloExchange(plan, ranks.channel, {{}}, false).Start({}),
                Kind::kInvalidArgument, "arrays: expected 1, got 0");
  });
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
