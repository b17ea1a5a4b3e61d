// GradredBegin, GradredSubmit, GradredJoin, GradredWait, GradredReduce, GradredPresent. See Note
// [Begin, Submit, Join, Wait]
#include "call_table.h"
#include "domains.h"
#include "instances.h"
#include "ops.h"
#include "shapes.h"

namespace gradred::tf {
namespace {

void EmitTicket(TF_OpKernelContext* context, int output, int64_t id) {
  EmitHandle(context, output, id, [](int64_t call) { CallTable::The().DropTicket(call); });
}

void* CreateBegin(TF_OpKernelConstruction* construction) {
  return new Instance(construction, StringAttr(construction, "domain"));
}
void DestroyBegin(void* kernel) { delete static_cast<Instance*>(kernel); }

void ShapeBegin(TF_ShapeInferenceContext* context, TF_Status* status) {
  Instance::EndGraph();
  ShapeScalar(context, status);
}

void Begin(void* kernel, TF_OpKernelContext* context) {
  const auto& instance = *static_cast<const Instance*>(kernel);
  EmitTicket(context, 0,
             CallTable::The().Begin({instance.key(), instance.Number(),
                                     TheApi().GetFrameId(context), TheApi().GetIterId(context)}));
}

struct SubmitKernel {
  int position;
  bool absent;
};

void* CreateSubmit(TF_OpKernelConstruction* construction) {
  return new SubmitKernel{static_cast<int>(IntAttr(construction, "position")),
                          BoolAttr(construction, "absent")};
}
void DestroySubmit(void* kernel) { delete static_cast<SubmitKernel*>(kernel); }

// The output `staged` becomes the buffer that the engine works in: the gradient's own when
// TensorFlow says that nobody else reads it. If not, the engine works in touched pages, and what
// TensorFlow has allocated is never written, so it costs next to nothing.
Staged Stage(TF_OpKernelContext* context, int output_index, bool absent) {
  TensorPtr input = Input(context, 0);
  const engine::Shape shape = ShapeOf(input.get());
  input.reset();  // our own reference would forbid the reuse
  const int candidate = 0;
  int forwarded = -1;
  TfStatus status;
  Staged staged;
  TF_Tensor* output =
      TheApi().ForwardInputOrAllocateOutput(context, &candidate, 1, output_index, shape.data(),
                                            static_cast<int>(shape.size()), &forwarded, status);
  status.ThrowIfError();
  staged.output = SharedTensor(output, DeleteTensor());
  staged.absent = absent;
  if (forwarded == 0) return staged;
  int64_t nbytes = DTypeSize(DTypeOf(output));
  for (int64_t d : shape) nbytes *= d;
  if (TensorPtr pooled = NewPooledTensor(TheApi().TensorType(output), shape, nbytes)) {
    staged.output = std::move(pooled);
    staged.replaced = true;
  }
  if (!absent) staged.input = SharedTensor(Input(context, 0));
  return staged;
}

void Submit(void* kernel, TF_OpKernelContext* context) {
  const auto* k = static_cast<const SubmitKernel*>(kernel);
  Staged staged = Stage(context, 0, k->absent);
  const CallPtr call = CallTable::The().AddTicket(ScalarInput(context, 1));
  EmitTicket(context, 1, call->id());
  call->Submit(k->position, std::move(staged), engine::Then::kStep);
}

void Join(void*, TF_OpKernelContext* context) {
  const int64_t id = ScalarInput(context, 0);  // as all the others
  CallTable::The().Join(id);
  EmitHandle(context, 0, id, [](int64_t call) { CallTable::The().DropJoined(call); });
}

void* CreateWait(TF_OpKernelConstruction* construction) {
  return new int(static_cast<int>(IntAttr(construction, "position")));
}
void DestroyWait(void* kernel) { delete static_cast<int*>(kernel); }

// Ends the kernel with the result of `position` when the whole call has ended: a replacement, else
// what Submit has emitted, input 0.
void EmitWhenFinished(TF_OpKernelContext* context, const CallPtr& call, int position, bool step,
                      Done done) {
  // The callback is the call's, so it holds no reference to it.
  const auto emit = [context, position, call = call.get(),
                     done = std::move(done)](const Status& failure) {
    try {
      ThrowIfError(failure);
      SharedTensor reduced = call->TakeReplacement(position);
      if (reduced == nullptr) reduced = Input(context, 0);
      TfStatus status;
      TheApi().SetOutput(context, 0, reduced.get(), status);
      status.ThrowIfError();
    } catch (...) {
      Fail(context, CurrentException());
    }
    done();
  };
  call->Wait(emit, step);
}

void Wait(void* kernel, TF_OpKernelContext* context, Done done) {
  EmitWhenFinished(context, CallTable::The().Find(ScalarInput(context, 1)),
                   *static_cast<const int*>(kernel), Call::NoneWaits(), std::move(done));
}

// Submit, Join and Wait of a call that has one member. Each op costs microseconds, and there is
// nothing to join. An output can be set once only, so what Submit would emit has one of its own,
// which nobody reads.
void Reduce(void*, TF_OpKernelContext* context, Done done) {
  const CallPtr call = CallTable::The().Take(ScalarInput(context, 1));
  const bool step = Call::NoneWaits();
  try {
    const auto then = step ? engine::Then::kWait : engine::Then::kStep;
    Staged staged = Stage(context, 1, /*absent=*/false);
    staged.replaced = true;
    call->Submit(0, std::move(staged), then);
  } catch (...) {
    call->Abandon(CurrentException().message());
    throw;
  }
  EmitWhenFinished(context, call, 0, step, std::move(done));
}

// How many ranks brought a tensor. The first input is there for the order: a result of the call.
void Present(void* kernel, TF_OpKernelContext* context) {
  const int position = *static_cast<const int*>(kernel);
  const TensorPtr output = NewOutput(context, 0, TF_INT32, {});
  *static_cast<int32_t*>(DataOf(output.get())) =
      CallTable::The().Find(ScalarInput(context, 1))->present(position);
}

void ShapeReduce(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapeOfInput(context, status);
  if (TheApi().GetCode(status) == TF_OK) SetShapeOfInput(context, 1, status);
}

void ShapeSubmit(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapeOfInput(context, status);
  if (TheApi().GetCode(status) != TF_OK) return;
  SetScalar(context, 1, status);
}

}  // namespace

const std::vector<OpDefinition>& GraphOps() {
  static const auto* ops = new std::vector<OpDefinition>{
      {"GradredBegin",
       {"domain: string"},
       {},
       {"ticket: int64"},
       /*stateful=*/true,
       &ShapeBegin,
       &CreateBegin,
       &DestroyBegin,
       &Begin,
       nullptr},
      {"GradredSubmit",
       {kTensorType, "position: int", "absent: bool = false"},
       {"tensor: T", "begun: int64"},
       {"staged: T", "ticket: int64"},
       /*stateful=*/true,
       &ShapeSubmit,
       &CreateSubmit,
       &DestroySubmit,
       &Submit,
       nullptr},
      // Stateful although it has no state: a Join that were pruned would look like a failed step.
      {"GradredJoin",
       {"N: int >= 1"},
       {"tickets: N * int64"},
       {"joined: int64"},
       /*stateful=*/true,
       &ShapeScalar,
       nullptr,
       nullptr,
       &Join,
       nullptr},
      {"GradredWait",
       {kTensorType, "position: int"},
       {"staged: T", "joined: int64"},
       {"reduced: T"},
       /*stateful=*/false,
       &ShapeOfInput,
       &CreateWait,
       &DestroyWait,
       nullptr,
       &Wait},
      {"GradredReduce",
       {kTensorType},
       {"tensor: T", "ticket: int64"},
       {"reduced: T", "staged: T"},
       /*stateful=*/true,
       &ShapeReduce,
       nullptr,
       nullptr,
       nullptr,
       &Reduce},
      {"GradredPresent",
       {kTensorType, "position: int"},
       {"reduced: T", "joined: int64"},
       {"present: int32"},
       /*stateful=*/false,
       &ShapeScalar,
       &CreateWait,
       &DestroyWait,
       &Present,
       nullptr},
  };
  return *ops;
}

}  // namespace gradred::tf
