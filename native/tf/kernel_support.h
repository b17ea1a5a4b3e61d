// What the kernels of the ops share: owners of TensorFlow's handles, errors, attrs, and
// asynchronous completion.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "engine/spec.h"
#include "tf_api.h"

namespace gradred::tf {

class TfStatus {
 public:
  TfStatus() : status_(TheApi().NewStatus()) {}
  ~TfStatus() { TheApi().DeleteStatus(status_); }
  TfStatus(const TfStatus&) = delete;
  bool ok() const { return TheApi().GetCode(status_) == TF_OK; }
  operator TF_Status*() { return status_; }
  void ThrowIfError() const;  // kInternal with TensorFlow's text

 private:
  TF_Status* const status_;
};

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TheApi().DeleteTensor(tensor); }
};
using TensorPtr = std::unique_ptr<TF_Tensor, DeleteTensor>;
using SharedTensor = std::shared_ptr<TF_Tensor>;

void* DataOf(const TF_Tensor* tensor);  // not null, also without elements
engine::Shape ShapeOf(const TF_Tensor* tensor);
DType DTypeOf(const TF_Tensor* tensor);  // throws kInvalidArgument for a type without a counterpart
DType DTypeOf(TF_DataType type);
TensorPtr Input(TF_OpKernelContext* context, int index);
int64_t ScalarInput(TF_OpKernelContext* context, int index);

// An output whose contents are to be written. Large ones are of pages that have been touched
// before, which TensorFlow's own allocator does not have.
TensorPtr NewOutput(TF_OpKernelContext* context, int index, TF_DataType type,
                    const engine::Shape& shape);
// A tensor of such pages, or null: too small to be worth it, or out of memory.
TensorPtr NewPooledTensor(TF_DataType type, const engine::Shape& shape, int64_t nbytes);

// The op fails with "gradred <Kind>: <message>" and the code of TensorFlow nearest to the kind.
void Fail(TF_OpKernelContext* context, const Status& status);

// A scalar whose buffer calls `dropped(value)` when TensorFlow gives up the last reference to it.
void EmitHandle(TF_OpKernelContext* context, int output, int64_t value, void (*dropped)(int64_t));

int64_t IntAttr(TF_OpKernelConstruction* construction, const char* name);
bool BoolAttr(TF_OpKernelConstruction* construction, const char* name);
std::string StringAttr(TF_OpKernelConstruction* construction, const char* name);
std::vector<int64_t> IntListAttr(TF_OpKernelConstruction* construction, const char* name);

using Done = std::function<void()>;

// An op and its kernels for CPU and, with all tensors in host memory, GPU.
struct OpDefinition {
  const char* name;
  std::vector<const char*> attrs, inputs, outputs;
  bool stateful;
  void (*shape)(TF_ShapeInferenceContext*, TF_Status*);
  void* (*create)(TF_OpKernelConstruction*);
  void (*destroy)(void*);
  // One of the two. `compute` and `start` throw Error for what fails at once; `start` then must not
  // have kept `done`.
  void (*compute)(void* kernel, TF_OpKernelContext*);
  void (*start)(void* kernel, TF_OpKernelContext*, Done done);
};
// Throws kInternal with TensorFlow's reason. The definition must outlive the process's kernels.
void Register(const OpDefinition& definition);

}  // namespace gradred::tf
