// GradredDiff: one node of differentiable communication, whatever the operation. GradredTokenBegin,
// GradredTokenEnd, GradredTokenZeros: the ends of a chain of tokens. See gradred/diff/token.py.
#include <cstring>

#include "diff/context.h"
#include "ops.h"
#include "pde/operation.h"
#include "shapes.h"
#include "sparse/operations.h"

namespace gradred::tf {
namespace {

diff::MakeOperation MakerOf(const std::string& name) {
  for (const auto* operations : {&diff::Operations(), &pde::Operations(), &sparse::Operations()}) {
    const auto at = operations->find(name);
    if (at != operations->end()) return at->second;
  }
  throw Error(Kind::kInternal, "gradred.diff has no operation '" + name + "'");
}

struct DiffKernel {
  explicit DiffKernel(TF_OpKernelConstruction* construction)
      : context(static_cast<int>(IntAttr(construction, "context"))),
        name(StringAttr(construction, "operation")) {
    const diff::MakeOperation make = MakerOf(name);
    try {
      operation = make(IntListAttr(construction, "params"));
    } catch (const Error& error) {  // when it runs, so that the other ranks hear of it
      operation = diff::MakeRefusal(error, name != "send" && name != "recv");
    }
    const TF_StringView node = TheApi().OpKernelConstruction_GetName(construction);
    what = name + " '" + std::string(node.data, node.len) + "'";
  }
  const int context;
  const std::string name;
  std::string what;
  std::unique_ptr<diff::Operation> operation;
};

void* CreateDiff(TF_OpKernelConstruction* construction) { return new DiffKernel(construction); }
void DestroyDiff(void* kernel) { delete static_cast<DiffKernel*>(kernel); }

// One execution of the op.
class DiffCall final : public diff::Call {
 public:
  DiffCall(TF_OpKernelContext* context, tf::Done done) : context_(context), done_(std::move(done)) {
    const int n = TheApi().NumInputs(context) - 1;  // the last is the token
    for (int i = 0; i < n; ++i) {
      tensors_.push_back(Input(context, i));
      const TF_Tensor* tensor = tensors_.back().get();
      inputs_.push_back({DataOf(tensor), DTypeOf(tensor), ShapeOf(tensor)});
    }
  }

  const diff::Inputs& inputs() const override { return inputs_; }

  void* Output(int index, const diff::Dims& shape) override {
    tensors_.push_back(
        NewOutput(context_, index, TheApi().ExpectedOutputDataType(context_, index), shape));
    return DataOf(tensors_.back().get());
  }

  void Forward(int index, int input) override {
    TfStatus status;
    TheApi().SetOutput(context_, index, tensors_.at(input).get(), status);
    status.ThrowIfError();
  }

  void Done(const Status& status, bool keep) override {
    try {
      ThrowIfError(status);
      const TensorPtr token = Input(context_, static_cast<int>(inputs_.size()));
      TfStatus set;
      TheApi().SetOutput(context_, TheApi().NumOutputs(context_) - 1, token.get(), set);
      set.ThrowIfError();
    } catch (...) {
      Fail(context_, CurrentException());
    }
    if (keep) {
      for (TensorPtr& tensor : tensors_) (void)tensor.release();
    }
    tensors_.clear();  // before the consumers run: they may reuse the buffers
    done_();
  }

 private:
  TF_OpKernelContext* const context_;
  const tf::Done done_;
  std::vector<TensorPtr> tensors_;  // inputs, then outputs
  diff::Inputs inputs_;
};

void StartDiff(void* kernel, TF_OpKernelContext* context, Done done) {
  auto* k = static_cast<DiffKernel*>(kernel);
  const auto group = diff::FindContext(k->context);
  group->Submit(k->operation.get(), k->what, std::make_unique<DiffCall>(context, std::move(done)));
}

TensorPtr NewToken(TF_OpKernelContext* context) {
  TensorPtr token = NewOutput(context, 0, TF_FLOAT, {});
  *static_cast<float*>(DataOf(token.get())) = 0.0f;
  return token;
}

void TokenBegin(void*, TF_OpKernelContext* context) { NewToken(context); }

void TokenEnd(void*, TF_OpKernelContext* context) {
  const TensorPtr x = Input(context, 0);
  TfStatus status;
  TheApi().SetOutput(context, 0, x.get(), status);
  status.ThrowIfError();
}

void TokenZeros(void*, TF_OpKernelContext* context) {
  const TensorPtr x = Input(context, 0);
  const TensorPtr zeros = NewOutput(context, 0, TheApi().TensorType(x.get()), ShapeOf(x.get()));
  int64_t nbytes = DTypeSize(DTypeOf(x.get()));
  for (const int64_t d : ShapeOf(x.get())) nbytes *= d;
  std::memset(DataOf(zeros.get()), 0, static_cast<size_t>(nbytes));
}

}  // namespace

const std::vector<OpDefinition>& DiffOps() {
  static const auto* ops = new std::vector<OpDefinition>{
      // Stateful, so that none is folded, merged or pruned: the peers wait for each.
      {"GradredDiff",
       {kInputTypes, kOutputTypes, "operation: string", "context: int", "params: list(int) = []"},
       {"xs: Tin", "token: float"},
       {"ys: Tout", "next: float"},
       /*stateful=*/true,
       &ShapesUnknown,
       &CreateDiff,
       &DestroyDiff,
       nullptr,
       &StartDiff},
      {"GradredTokenBegin",
       {"Tin: list(type) >= 0", "context: int"},
       {"xs: Tin"},
       {"token: float"},
       /*stateful=*/false,
       &ShapeScalar,
       nullptr,
       nullptr,
       &TokenBegin,
       nullptr},
      {"GradredTokenEnd",
       {"T: type", "context: int"},
       {"x: T", "token: float"},
       {"y: T"},
       /*stateful=*/false,
       &ShapeOfInput,
       nullptr,
       nullptr,
       &TokenEnd,
       nullptr},
      {"GradredTokenZeros",
       {kTensorType, "context: int"},
       {"x: T", "token: float"},
       {"zeros: T"},
       /*stateful=*/false,
       &ShapeOfInput,
       nullptr,
       nullptr,
       &TokenZeros,
       nullptr},
  };
  return *ops;
}

}  // namespace gradred::tf
