// GradredAllToAll: an alltoall, whose splits are a tensor. In eager mode and in graphs.
#include <cstring>

#include "domains.h"
#include "engine/engine.h"
#include "instances.h"
#include "ops.h"
#include "shapes.h"

namespace gradred::tf {
namespace {

struct AllToAllKernel {
  explicit AllToAllKernel(TF_OpKernelConstruction* construction)
      : instance(construction, StringAttr(construction, "domain")),
        equal(BoolAttr(construction, "equal")) {}
  const Instance instance;
  const bool equal;  // parts: the input `splits` means nothing
};

void* CreateAllToAll(TF_OpKernelConstruction* construction) {
  return new AllToAllKernel(construction);
}
void DestroyAllToAll(void* kernel) { delete static_cast<AllToAllKernel*>(kernel); }

// One execution of the op. Owned by its submission.
class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(TF_OpKernelContext* context, Done done)
      : context_(context), done_(std::move(done)), input_(Input(context, 0)) {}

  const TF_Tensor* input() const { return input_.get(); }

  engine::Submission SubmissionOf(bool equal) {
    engine::Submission submission;
    submission.input = DataOf(input_.get());
    if (!equal) submission.splits = Splits();
    const std::shared_ptr<Run> self = shared_from_this();
    submission.allocate = [self](const engine::Shape& shape) { return self->Allocate(shape); };
    submission.done = [self](const engine::Result& result) { self->Finish(result); };
    return submission;
  }

 private:
  std::vector<int64_t> Splits() const {
    const TensorPtr splits = Input(context_, 1);
    int64_t count = 1;
    for (int64_t d : ShapeOf(splits.get())) count *= d;
    const auto* data = static_cast<const int64_t*>(DataOf(splits.get()));
    return {data, data + count};
  }

  void* Allocate(const engine::Shape& shape) {
    try {
      output_ = NewOutput(context_, 0, TheApi().TensorType(input_.get()), shape);
      return DataOf(output_.get());
    } catch (const Error&) {
      return nullptr;  // the engine says of what
    }
  }

  void Finish(const engine::Result& result) {
    try {
      ThrowIfError(result.status);
      const std::vector<int64_t>& rows = result.received_splits;
      const TensorPtr received =
          NewOutput(context_, 1, TF_INT64, {static_cast<int64_t>(rows.size())});
      std::memcpy(DataOf(received.get()), rows.data(), rows.size() * sizeof(int64_t));
    } catch (...) {
      Fail(context_, CurrentException());
    }
    // Given back before the consumers run: a buffer that only they refer to can be reused by them.
    input_.reset();
    output_.reset();
    done_();
  }

  TF_OpKernelContext* const context_;
  const Done done_;
  TensorPtr input_, output_;
};

void ShapesAllToAll(TF_ShapeInferenceContext* context, TF_Status* status) {
  Instance::EndGraph();
  ShapesUnknown(context, status);
}

void AllToAll(void* kernel, TF_OpKernelContext* context, Done done) {
  auto* k = static_cast<AllToAllKernel*>(kernel);
  const std::shared_ptr<engine::Engine> engine = engine::Global();
  engine::DomainSpecPtr spec = SpecFor(k->instance.key(), k->instance.Suffix());
  auto run = std::make_shared<Run>(context, std::move(done));
  const engine::Shape shape = ShapeOf(run->input());
  CheckFits(*spec, 0, DTypeOf(run->input()), shape);
  if (!spec->complete()) spec = WithShapes(spec, {shape});
  const engine::OpenBatchPtr batch = engine->Open(spec);
  try {
    engine->Submit(batch, 0, run->SubmissionOf(k->equal));
  } catch (const Error& error) {  // splits that do not fit: the others must not wait
    engine->Abandon(batch, error.what());
    throw;
  }
}

}  // namespace

const std::vector<OpDefinition>& AllToAllOps() {
  static const auto* ops = new std::vector<OpDefinition>{
      {"GradredAllToAll",
       {kTensorType, "domain: string", "equal: bool"},
       {"tensor: T", "splits: int64"},
       {"result: T", "received_splits: int64"},
       /*stateful=*/true,
       &ShapesAllToAll,
       &CreateAllToAll,
       &DestroyAllToAll,
       nullptr,
       &AllToAll},
  };
  return *ops;
}

}  // namespace gradred::tf
