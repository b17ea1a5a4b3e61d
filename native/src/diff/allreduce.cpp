// Reductions of all ranks' values: on every rank, or on one.
#include <algorithm>
#include <cstring>

#include "diff/operation.h"
#include "reduce/convert.h"

namespace gradred::diff {
namespace {

// One tensor as a layout. Without `out` the result is not kept.
class TensorCargo final : public comm::Cargo {
 public:
  TensorCargo(const Input& in, void* out, double scale)
      : in_(static_cast<const char*>(in.data)),
        out_(static_cast<char*>(out)),
        dtype_(in.dtype),
        nbytes_(in.nbytes()),
        scale_(scale) {}

  void Pack(reduce::Range range, void* at) override {
    const int64_t n = Clip(range);
    std::memcpy(at, in_ + range.begin, static_cast<size_t>(n));
    // What follows the tensor is sent too.
    std::memset(static_cast<char*>(at) + n, 0, static_cast<size_t>(range.nbytes() - n));
  }
  void Unpack(reduce::Range range, const void* at) override {
    if (out_ == nullptr) return;
    reduce::Convert(out_ + range.begin, dtype_, at, dtype_, Clip(range) / DTypeSize(dtype_), scale_,
                    nullptr);
  }

 private:
  int64_t Clip(reduce::Range range) const {
    return std::max<int64_t>(std::min(range.end, nbytes_) - range.begin, 0);
  }
  const char* const in_;
  char* const out_;
  const DType dtype_;
  const int64_t nbytes_;
  const double scale_;
};

void ReduceTensor(const Input& input, reduce::ReduceOp op, void* out, Channel& channel) {
  if (input.count() == 0) return;
  double scale = 1;
  if (op == reduce::ReduceOp::kAverage) {
    scale = IsHalf(input.dtype) ? channel.average_residual() : 1.0 / channel.size();
    if (!IsHalf(input.dtype)) op = reduce::ReduceOp::kSum;
  }
  const auto layout = std::make_shared<const reduce::Layout>(
      std::vector<reduce::Section>{{0, input.count(), input.dtype, op}});
  channel.AllReduce(layout, std::make_shared<TensorCargo>(input, out, scale));
}

class AllReduce final : public Operation {
 public:
  explicit AllReduce(reduce::ReduceOp op) : op_(op) {}

  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const Input& x = inputs.at(0);
    if (op_ == reduce::ReduceOp::kAverage && !IsFloating(x.dtype))
      throw Error(Kind::kInvalidArgument, std::string("allreduce(mean) of ") + DTypeName(x.dtype) +
                                              ": expected a floating dtype; use sum");
    return {std::string("allreduce(") + reduce::ReduceOpName(op_) + ") of " + DTypeName(x.dtype) +
                " " + ToText(x.shape),
            {}};
  }

  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    ReduceTensor(x, op_, call.Output(0, x.shape), channel);
  }

 private:
  const reduce::ReduceOp op_;
};

class Reduce final : public Operation {
 public:
  explicit Reduce(int root) : root_(root) {}

  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const Input& x = inputs.at(0);
    return {"reduce to root " + std::to_string(root_) + " of " + DTypeName(x.dtype) + " " +
                ToText(x.shape),
            {}};
  }

  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    void* out = call.Output(0, x.shape);
    const bool mine = channel.rank() == root_;
    ReduceTensor(x, reduce::ReduceOp::kSum, mine ? out : nullptr, channel);
    if (!mine) std::memset(out, 0, static_cast<size_t>(x.nbytes()));
  }

 private:
  const int root_;
};

}  // namespace

std::unique_ptr<Operation> MakeAllReduce(const Params& params) {
  return std::make_unique<AllReduce>(static_cast<reduce::ReduceOp>(params.at(0)));
}

std::unique_ptr<Operation> MakeReduce(const Params& params) {
  return std::make_unique<Reduce>(static_cast<int>(params.at(0)));
}

}  // namespace gradred::diff
