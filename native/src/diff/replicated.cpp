// Values that are equal on all ranks.
#include <string>

#include "base/digest.h"
#include "diff/operation.h"

namespace gradred::diff {
namespace {

// Sends nothing: the adjoint does.
class Replicate final : public Operation {
 public:
  bool collective() const override { return false; }
  Terms TermsOf(const Inputs&, const Channel&) const override { return {}; }
  void Run(Call& call, Channel&, const Numbers&) override { call.Forward(0, 0); }
};

class CheckReplicated final : public Operation {
 public:
  bool needs_numbers() const override { return true; }

  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const Input& x = inputs.at(0);
    const Digest digest =
        DigestOf(std::string(static_cast<const char*>(x.data), static_cast<size_t>(x.nbytes())), 0);
    return {std::string("check_replicated of ") + DTypeName(x.dtype) + " " + ToText(x.shape),
            {static_cast<int64_t>(digest.hi), static_cast<int64_t>(digest.lo)}};
  }

  void Run(Call& call, Channel& channel, const Numbers& numbers) override {
    const Input& x = call.inputs()[0];
    std::string others;
    for (size_t r = 0; r < numbers.size(); ++r)
      if (numbers[r] != numbers[0])
        others += (others.empty() ? "" : ", ") + std::to_string(channel.members()[r]);
    if (!others.empty())
      throw AgreedError(Kind::kMismatch,
                        std::string("check_replicated of ") + DTypeName(x.dtype) + " " +
                            ToText(x.shape) + " in context '" + channel.name() +
                            "': expected equal values on all ranks; those of ranks " + others +
                            " are not those of rank " + std::to_string(channel.members()[0]));
    call.Forward(0, 0);
  }
};

}  // namespace

std::unique_ptr<Operation> MakeReplicate(const Params&) { return std::make_unique<Replicate>(); }
std::unique_ptr<Operation> MakeCheckReplicated(const Params&) {
  return std::make_unique<CheckReplicated>();
}

}  // namespace gradred::diff
