// Sums of this rank's value and those of all ranks before it, or behind it.
#include <cstring>
#include <utility>

#include "diff/operation.h"
#include "reduce/kernels.h"

namespace gradred::diff {
namespace {

// Recursive doubling (Hillis, Steele: doi:10.1145/7902.7903): after the k-th exchange each rank has
// the sum of up to 2^k ranks.
class Scan final : public Operation {
 public:
  explicit Scan(int direction) : direction_(direction) {}

  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const Input& x = inputs.at(0);
    return {std::string(direction_ > 0 ? "scan of " : "scan from the last rank of ") +
                DTypeName(x.dtype) + " " + ToText(x.shape),
            {}};
  }

  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    const int64_t nbytes = x.nbytes();
    void* sum = call.Output(0, x.shape);
    std::memcpy(sum, x.data, static_cast<size_t>(nbytes));
    if (nbytes == 0) return;
    void* other = channel.Scratch(nbytes);
    const auto add =
        reduce::BestLoops()
            .reduce[static_cast<int>(reduce::ReduceOp::kSum)][static_cast<int>(x.dtype)];
    const auto in_range = [&](int rank) { return rank >= 0 && rank < channel.size(); };
    for (int distance = 1; distance < channel.size(); distance *= 2) {
      const int to = channel.rank() + direction_ * distance;
      const int from = channel.rank() - direction_ * distance;
      if (in_range(to)) channel.Send(to, sum, nbytes);
      if (in_range(from)) channel.Recv(from, other, nbytes);
      channel.WaitForMessages();
      if (!in_range(from)) continue;
      const void* ins[2] = {other, sum};
      if (direction_ < 0) std::swap(ins[0], ins[1]);
      add(sum, ins, 2, 0, x.count(), 1.0f);
    }
  }

 private:
  const int direction_;
};

}  // namespace

std::unique_ptr<Operation> MakeScan(const Params& params) {
  return std::make_unique<Scan>(static_cast<int>(params.at(0)));
}

}  // namespace gradred::diff
