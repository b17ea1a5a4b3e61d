// The op BenchWork: a known amount of arithmetic, or of sleep, between its input and its output.
//
// TensorFlow's C API only, so any compiler fits. `units` are nanoseconds of sleep, or rounds of
// arithmetic: work, and not time, so that a thread that takes the core away is seen.

#include <sys/prctl.h>
#include <time.h>

#include <cstdint>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"

namespace {

struct Work {
  int64_t units = 0;
  unsigned char sleep = 0;
};

// Registers alone: it neither needs memory nor disturbs who does.
float Compute(int64_t units) {
  float a = 1.0f, b = 1.1f, c = 1.2f, d = 1.3f;
  for (int64_t i = 0; i < units; ++i) {
    a = a * 0.999f + 0.001f;
    b = b * 0.999f + 0.001f;
    c = c * 0.999f + 0.001f;
    d = d * 0.999f + 0.001f;
    asm volatile("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d));
  }
  return a + b + c + d;
}

void Sleep(int64_t nanoseconds) {
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  timespec time{nanoseconds / 1000000000, nanoseconds % 1000000000};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &time, nullptr);
}

void* Create(TF_OpKernelConstruction* construction) {
  auto* work = new Work;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "units", &work->units, status);
  if (TF_GetCode(status) == TF_OK) {
    TF_OpKernelConstruction_GetAttrBool(construction, "sleep", &work->sleep, status);
  }
  if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
  TF_DeleteStatus(status);
  return work;
}

void Run(void* kernel, TF_OpKernelContext* context) {
  const auto* work = static_cast<const Work*>(kernel);
  if (work->sleep) {
    Sleep(work->units);
  } else {
    volatile float used = Compute(work->units);
    (void)used;
  }
  TF_Status* status = TF_NewStatus();
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, 0, &tensor, status);
  if (TF_GetCode(status) == TF_OK) TF_SetOutput(context, 0, tensor, status);
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
  if (tensor != nullptr) TF_DeleteTensor(tensor);
  TF_DeleteStatus(status);
}

void Delete(void* kernel) { delete static_cast<Work*>(kernel); }

void ScalarShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* scalar = TF_ShapeInferenceContextScalar(context);
  TF_ShapeInferenceContextSetOutput(context, 0, scalar, status);
  TF_DeleteShapeHandle(scalar);
}

__attribute__((constructor)) void Register() {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("BenchWork");
  TF_OpDefinitionBuilderAddInput(op, "x: float");
  TF_OpDefinitionBuilderAddOutput(op, "y: float");
  TF_OpDefinitionBuilderAddAttr(op, "units: int");
  TF_OpDefinitionBuilderAddAttr(op, "sleep: bool");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, &ScalarShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder("BenchWork", "CPU", &Create, &Run, &Delete);
  TF_RegisterKernelBuilder("BenchWork", kernel, status);
  TF_DeleteStatus(status);
}

}  // namespace
