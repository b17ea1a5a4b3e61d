// Reductions of all ranks' values: on every rank, or on one.
#include <cstring>

#include "diff/reduction.h"

namespace gradred::diff {
namespace {

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
