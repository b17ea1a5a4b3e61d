// Halo exchange as an operation, forward and adjoint.
#include <algorithm>
#include <cstring>

#include "diff/halo.h"
#include "diff/operation.h"

namespace gradred::diff {
namespace {

// Params: axis (the first of the grid's in the tensors), then what ReadHaloPlan reads. Inputs:
// fields, of this rank's block; or, of the adjoint, their cotangents with ghost layers.
class Halo final : public Operation {
 public:
  Halo(const Params& params, bool adjoint)
      : adjoint_(adjoint),
        axis_(params.at(0)),
        plan_(ReadHaloPlan({params.begin() + 1, params.end()})),
        // Without the rank, which is the first that is read.
        text_(ToText(Params(params.begin() + 2, params.end()))) {}

  Terms TermsOf(const Inputs& inputs, const Channel& channel) const override {
    if (plan_.ranks() != channel.size() || plan_.rank() != channel.rank())
      throw Error(Kind::kInvalidArgument,
                  "halo exchange: expected a plan of rank " + std::to_string(channel.rank()) +
                      " of " + std::to_string(channel.size()) + ", got one of rank " +
                      std::to_string(plan_.rank()) + " of " + std::to_string(plan_.ranks()));
    const Dims expected = BlockOf(adjoint_ ? plan_.padded() : plan_.interior());
    std::string fields;
    for (const Input& x : inputs) {
      const Split split = SplitOf(x.shape);
      if (split.block != expected)
        throw Error(Kind::kInvalidArgument,
                    "halo exchange: expected a block of shape " + ToText(expected) + " from axis " +
                        std::to_string(axis_) + " on, got a tensor of shape " + ToText(x.shape));
      fields += std::string(fields.empty() ? "" : ", ") + DTypeName(x.dtype) + " " +
                std::to_string(split.outer) + " x block x " + std::to_string(split.inner);
    }
    return {std::string(adjoint_ ? "adjoint of a " : "") + "halo exchange of " + fields +
                " by the plan " + text_,
            {}};
  }

  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Dims block = BlockOf(adjoint_ ? plan_.interior() : plan_.padded());
    std::vector<FieldType> fields;
    std::vector<const void*> in;
    std::vector<void*> out;
    for (const Input& x : call.inputs()) {
      const Split split = SplitOf(x.shape);
      fields.push_back({x.dtype, split.outer, split.inner});
      in.push_back(x.data);
      Dims shape = x.shape;
      std::copy(block.begin(), block.end(), shape.begin() + axis_);
      out.push_back(call.Output(static_cast<int>(out.size()), shape));
    }
    (adjoint_ ? HaloAdjoint : HaloForward)(plan_, channel, fields, in, out);
  }

 private:
  struct Split {
    int64_t outer = 1, inner = 1;
    Dims block;
  };

  Split SplitOf(const Dims& shape) const {
    const auto rank = static_cast<int64_t>(shape.size());
    const int64_t begin = std::min(axis_, rank);
    const int64_t end = std::min(axis_ + plan_.dimensions(), rank);
    return {CountOf(Dims(shape.begin(), shape.begin() + begin)),
            CountOf(Dims(shape.begin() + end, shape.end())),
            Dims(shape.begin() + begin, shape.begin() + end)};
  }
  Dims BlockOf(const GridShape& shape) const {
    return Dims(shape.end() - plan_.dimensions(), shape.end());
  }

  const bool adjoint_;
  const int64_t axis_;
  const HaloPlan plan_;
  const std::string text_;
};

}  // namespace

HaloPlan ReadHaloPlan(const Params& params) {
  size_t at = 0;
  const auto next = [&] { return params.at(at++); };
  const auto rank = static_cast<int>(next());
  HaloGrid grid;
  grid.corners = next() != 0;
  const int64_t constant = next();
  std::memcpy(&grid.constant, &constant, sizeof constant);
  grid.dimensions.resize(static_cast<size_t>(next()));
  for (HaloGrid::Dimension& dimension : grid.dimensions) {
    for (int64_t& width : dimension.widths) width = next();
    for (Boundary& boundary : dimension.boundaries) boundary = static_cast<Boundary>(next());
    dimension.blocks.resize(static_cast<size_t>(next()));
    for (int64_t& block : dimension.blocks) block = next();
  }
  return HaloPlan(std::move(grid), rank);
}

std::unique_ptr<Operation> MakeHalo(const Params& params) {
  return std::make_unique<Halo>(params, false);
}
std::unique_ptr<Operation> MakeHaloAdjoint(const Params& params) {
  return std::make_unique<Halo>(params, true);
}

}  // namespace gradred::diff
