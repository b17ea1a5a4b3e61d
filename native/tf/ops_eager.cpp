// GradredRunList: all entries of a domain in one op. Eager mode waits for each op, so one op takes
// the list there; in graphs it serves the collectives whose output shape is known only at the end.
#include <map>
#include <mutex>
#include <set>

#include "domains.h"
#include "engine/engine.h"
#include "instances.h"
#include "ops.h"
#include "shapes.h"

namespace gradred::tf {
namespace {

struct RunListKernel {
  explicit RunListKernel(TF_OpKernelConstruction* construction)
      : instance(construction, StringAttr(construction, "domain")) {}
  const Instance instance;
  std::set<int> absent;  // positions whose tensor is only the place for the result
};

void* CreateRunList(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<RunListKernel>(construction);
  for (int64_t position : IntListAttr(construction, "absent"))
    kernel->absent.insert(static_cast<int>(position));
  return kernel.release();
}
void DestroyRunList(void* kernel) { delete static_cast<RunListKernel*>(kernel); }

// One execution of the op. Owned by its submissions.
class Run {
 public:
  Run(TF_OpKernelContext* context, Done done)
      : context_(context), done_(std::move(done)), present_(TheApi().NumInputs(context)) {}

  // Inputs, and outputs where their shapes are known. No output reuses an input: eager mode has no
  // temporaries, and what is broadcast or gathered in a graph is mostly a variable.
  void Prepare(const engine::DomainSpec& spec, const std::set<int>& absent) {
    const int n = static_cast<int>(present_.size());
    if (n != static_cast<int>(spec.entries.size()))
      throw Error(Kind::kInternal, "'" + spec.name + "' has " +
                                       std::to_string(spec.entries.size()) + " entries, got " +
                                       std::to_string(n) + " tensors");
    for (int i = 0; i < n; ++i) {
      inputs_.push_back(Input(context_, i));
      shapes_.push_back(ShapeOf(inputs_[i].get()));
      CheckFits(spec, i, DTypeOf(inputs_[i].get()), shapes_[i]);
    }
    remaining_ = n;
    outputs_.resize(n);
    for (int i = 0; i < n; ++i) {
      if (!HasShapeOfInput(spec.entries[i].op)) continue;
      outputs_[i] = NewOutput(context_, i, TheApi().TensorType(inputs_[i].get()), shapes_[i]);
      if (absent.count(i) > 0) inputs_[i].reset();
    }
  }

  const std::vector<engine::Shape>& shapes() const { return shapes_; }
  bool Finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    return remaining_ == 0;
  }

  engine::Submission SubmissionOf(const std::shared_ptr<Run>& self, int i, bool absent) {
    engine::Submission submission;
    submission.absent = absent;
    if (outputs_[i] != nullptr) {
      submission.output = DataOf(outputs_[i].get());
    } else {
      submission.allocate = [self, i](const engine::Shape& shape) {
        return self->Allocate(i, shape);
      };
    }
    if (!absent) submission.input = DataOf(inputs_[i].get());
    submission.done = [self, i](const engine::Result& result) { self->Finish(i, result); };
    return submission;
  }

  // Of the entries from `first` on, which were not submitted.
  void GiveUp(int first, const Status& status) {
    engine::Result result;
    result.status = status;
    for (int i = first; i < static_cast<int>(present_.size()); ++i) Finish(i, result);
  }

 private:
  static bool HasShapeOfInput(engine::Op op) {
    return op == engine::Op::kAllReduce || op == engine::Op::kBroadcast ||
           op == engine::Op::kBarrier;
  }

  void* Allocate(int i, const engine::Shape& shape) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      outputs_[i] = NewOutput(context_, i, TheApi().TensorType(inputs_[i].get()), shape);
      return DataOf(outputs_[i].get());
    } catch (const Error&) {
      return nullptr;  // the engine says of what
    }
  }

  void Finish(int i, const engine::Result& result) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_.ok()) failure_ = result.status;
      present_[i] = result.present;
      if (--remaining_ > 0) return;
    }
    if (failure_.ok()) EmitPresent();
    if (!failure_.ok()) Fail(context_, failure_);
    // Given back before the consumers run: a buffer that only they refer to can be reused by them.
    inputs_.clear();
    outputs_.clear();
    done_();
  }

  void EmitPresent() {
    try {
      const int64_t n = static_cast<int64_t>(present_.size());
      TfStatus status;
      const TensorPtr output(TheApi().AllocateOutput(context_, static_cast<int>(n), TF_INT32, &n, 1,
                                                     n * sizeof(int32_t), status));
      status.ThrowIfError();
      auto* data = static_cast<int32_t*>(TheApi().TensorData(output.get()));
      for (int64_t i = 0; i < n; ++i) data[i] = present_[i];
    } catch (...) {
      failure_ = CurrentException();
    }
  }

  TF_OpKernelContext* const context_;
  const Done done_;
  std::vector<TensorPtr> inputs_, outputs_;
  std::vector<engine::Shape> shapes_;
  std::mutex mutex_;
  std::vector<int> present_;
  int remaining_ = 0;
  Status failure_;
};

void ShapesRunList(TF_ShapeInferenceContext* context, TF_Status* status) {
  Instance::EndGraph();
  ShapesUnknown(context, status);
}

void RunList(void* kernel, TF_OpKernelContext* context, Done done) {
  auto* k = static_cast<RunListKernel*>(kernel);
  const std::shared_ptr<engine::Engine> engine = engine::Global();
  engine::DomainSpecPtr spec = SpecFor(k->instance.key(), k->instance.Suffix());
  auto run = std::make_shared<Run>(context, std::move(done));
  run->Prepare(*spec, k->absent);
  if (!spec->complete()) spec = WithShapes(spec, run->shapes());
  const engine::OpenBatchPtr batch = engine->Open(spec);
  std::vector<engine::Submission> submissions;
  const int n = static_cast<int>(spec->entries.size());
  for (int i = 0; i < n; ++i)
    submissions.push_back(run->SubmissionOf(run, i, k->absent.count(i) > 0));
  int i = 0;
  try {
    for (; i < n; ++i)
      engine->Submit(batch, i, std::move(submissions[i]),
                     i + 1 < n ? engine::Then::kStep : engine::Then::kWait);
  } catch (...) {  // the others must not wait for it, and what was submitted ends with this op
    const Status status = CurrentException();
    engine->Abandon(batch, status.message());
    run->GiveUp(i, status);
  }
  engine->StepUntil([&run] { return run->Finished(); });
}

}  // namespace

const std::vector<OpDefinition>& EagerOps() {
  static const auto* ops = new std::vector<OpDefinition>{
      {"GradredRunList",
       {kTensorTypes, "domain: string", "absent: list(int) = []"},
       {"tensors: T"},
       {"results: T", "present: int32"},
       /*stateful=*/true,
       &ShapesRunList,
       &CreateRunList,
       &DestroyRunList,
       nullptr,
       &RunList},
  };
  return *ops;
}

}  // namespace gradred::tf
