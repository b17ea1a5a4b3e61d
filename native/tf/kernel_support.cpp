#include "kernel_support.h"

#include <cstdlib>
#include <future>

#include "base/log.h"
#include "base/page_pool.h"

namespace gradred::tf {

void TfStatus::ThrowIfError() const {
  if (!ok()) throw Error(Kind::kInternal, TheApi().Message(status_));
}

void* DataOf(const TF_Tensor* tensor) {
  static char nothing[64];
  void* data = TheApi().TensorData(tensor);
  return data != nullptr ? data : nothing;
}

engine::Shape ShapeOf(const TF_Tensor* tensor) {
  engine::Shape shape(TheApi().NumDims(tensor));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = TheApi().Dim(tensor, static_cast<int>(i));
  return shape;
}

DType DTypeOf(const TF_Tensor* tensor) { return DTypeOf(TheApi().TensorType(tensor)); }

DType DTypeOf(TF_DataType type) {
  switch (type) {
    case TF_BOOL:
      return DType::kBool;
    case TF_UINT8:
      return DType::kUint8;
    case TF_UINT16:
      return DType::kUint16;
    case TF_UINT32:
      return DType::kUint32;
    case TF_UINT64:
      return DType::kUint64;
    case TF_INT8:
      return DType::kInt8;
    case TF_INT16:
      return DType::kInt16;
    case TF_INT32:
      return DType::kInt32;
    case TF_INT64:
      return DType::kInt64;
    case TF_HALF:
      return DType::kFloat16;
    case TF_BFLOAT16:
      return DType::kBfloat16;
    case TF_FLOAT:
      return DType::kFloat32;
    case TF_DOUBLE:
      return DType::kFloat64;
    default:
      break;
  }
  throw Error(Kind::kInvalidArgument, "a tensor of TensorFlow's type number " +
                                          std::to_string(static_cast<unsigned>(type)) +
                                          "; supported are bool, uint8 to uint64, int8 to int64, "
                                          "float16, bfloat16, float32, float64");
}

TensorPtr Input(TF_OpKernelContext* context, int index) {
  TfStatus status;
  TF_Tensor* tensor = nullptr;
  TheApi().GetInput(context, index, &tensor, status);
  status.ThrowIfError();
  return TensorPtr(tensor);
}

int64_t ScalarInput(TF_OpKernelContext* context, int index) {
  return *static_cast<const int64_t*>(TheApi().TensorData(Input(context, index).get()));
}

TensorPtr NewPooledTensor(TF_DataType type, const engine::Shape& shape, int64_t nbytes) {
  if (nbytes < PagePool::kLeast) return nullptr;
  void* data = PagePool::The().Take(nbytes);
  if (data == nullptr) return nullptr;
  const auto release = [](void* pages, size_t size, void*) {
    PagePool::The().Give(pages, static_cast<int64_t>(size));
  };
  return TensorPtr(TheApi().NewTensor(type, shape.data(), static_cast<int>(shape.size()), data,
                                      static_cast<size_t>(nbytes), release, nullptr));
}

TensorPtr NewOutput(TF_OpKernelContext* context, int index, TF_DataType type,
                    const engine::Shape& shape) {
  int64_t nbytes = DTypeSize(DTypeOf(type));
  for (int64_t d : shape) nbytes *= d;
  TfStatus status;
  TensorPtr output = NewPooledTensor(type, shape, nbytes);
  if (output != nullptr)
    TheApi().SetOutput(context, index, output.get(), status);
  else
    output.reset(TheApi().AllocateOutput(context, index, type, shape.data(),
                                         static_cast<int>(shape.size()),
                                         static_cast<size_t>(nbytes), status));
  status.ThrowIfError();
  return output;
}

namespace {

TF_Code CodeOf(Kind kind) {
  switch (kind) {
    case Kind::kInvalidArgument:
      return TF_INVALID_ARGUMENT;
    case Kind::kMismatch:
    case Kind::kNotInitialized:
      return TF_FAILED_PRECONDITION;
    case Kind::kAbandoned:
      return TF_ABORTED;
    case Kind::kUnsupported:
      return TF_UNIMPLEMENTED;
    case Kind::kTimeout:
      return TF_DEADLINE_EXCEEDED;
    case Kind::kPeerLost:
    case Kind::kTransportError:
      return TF_UNAVAILABLE;
    case Kind::kOk:
    case Kind::kInternal:
      break;
  }
  return TF_INTERNAL;
}

}  // namespace

void Fail(TF_OpKernelContext* context, const Status& status) {
  TfStatus tf_status;
  TheApi().SetStatus(tf_status, CodeOf(status.kind()), ("gradred " + status.ToString()).c_str());
  TheApi().OpKernelContext_Failure(context, tf_status);
}

void EmitHandle(TF_OpKernelContext* context, int output, int64_t value, void (*dropped)(int64_t)) {
  struct Handle {
    int64_t value;
    void (*dropped)(int64_t);
  };
  // TensorFlow copies a buffer that is not aligned to 64 bytes, and then drops ours at once.
  auto* handle = static_cast<Handle*>(std::aligned_alloc(64, 64));
  *handle = {value, dropped};
  const auto release = [](void* data, size_t, void*) {
    const Handle last = *static_cast<Handle*>(data);
    std::free(data);
    last.dropped(last.value);
  };
  const TensorPtr tensor(
      TheApi().NewTensor(TF_INT64, nullptr, 0, handle, sizeof(int64_t), release, nullptr));
  TfStatus status;
  TheApi().SetOutput(context, output, tensor.get(), status);
  status.ThrowIfError();
}

int64_t IntAttr(TF_OpKernelConstruction* construction, const char* name) {
  TfStatus status;
  int64_t value = 0;
  TheApi().OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
  status.ThrowIfError();
  return value;
}

bool BoolAttr(TF_OpKernelConstruction* construction, const char* name) {
  TfStatus status;
  TF_Bool value = 0;
  TheApi().OpKernelConstruction_GetAttrBool(construction, name, &value, status);
  status.ThrowIfError();
  return value != 0;
}

std::string StringAttr(TF_OpKernelConstruction* construction, const char* name) {
  TfStatus status;
  int32_t list_size = 0, nbytes = 0;
  TheApi().OpKernelConstruction_GetAttrSize(construction, name, &list_size, &nbytes, status);
  status.ThrowIfError();
  std::string value(nbytes, '\0');
  if (nbytes > 0)
    TheApi().OpKernelConstruction_GetAttrString(construction, name, value.data(), nbytes, status);
  status.ThrowIfError();
  return value;
}

std::vector<int64_t> IntListAttr(TF_OpKernelConstruction* construction, const char* name) {
  TfStatus status;
  int32_t list_size = 0, nbytes = 0;
  TheApi().OpKernelConstruction_GetAttrSize(construction, name, &list_size, &nbytes, status);
  status.ThrowIfError();
  std::vector<int64_t> values(list_size);
  if (list_size > 0)
    TheApi().OpKernelConstruction_GetAttrInt64List(construction, name, values.data(), list_size,
                                                   status);
  status.ThrowIfError();
  return values;
}

namespace {

// Note [The done callback]
// TensorFlow's asynchronous C kernel passes the address of a std::function<void()> that it holds by
// value and that dies when our function returns, so TF_RunAsyncOpKernelDoneCallback cannot be
// called later. We move the function out before we return. The pointer's type is opaque, so at load
// a std::function of ours is run through TensorFlow: if that works, the layouts agree. If not,
// asynchronous ops become blocking ones.
bool DoneIsStdFunction() {
  bool called = false;
  auto* probe = new Done([&called] { called = true; });  // kept: TensorFlow may take it over
  TheApi().RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(probe));
  return called;
}

bool CanRunAsync() {
  static const bool can = [] {
    if (DoneIsStdFunction()) return true;
    Log(LogLevel::kWarning,
        "this TensorFlow's asynchronous kernels are not understood: each op that waits for a "
        "reduction blocks a thread of TensorFlow's");
    return false;
  }();
  return can;
}

// What TensorFlow passes to the functions below as the kernel.
struct Kernel {
  const OpDefinition* op;
  void* state;
  ~Kernel() {
    if (state != nullptr) op->destroy(state);
  }
};

template <class Body>
void Guarded(TF_OpKernelContext* context, const Body& body, const Done& on_error) {
  try {
    body();
  } catch (...) {
    Fail(context, CurrentException());
    if (on_error) on_error();
  }
}

void Compute(void* kernel, TF_OpKernelContext* context) {
  auto* k = static_cast<Kernel*>(kernel);
  Guarded(context, [&] { k->op->compute(k->state, context); }, nullptr);
}

void StartAsync(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback) {
  auto* k = static_cast<Kernel*>(kernel);
  Done done = std::move(*reinterpret_cast<Done*>(callback));  // See Note [The done callback]
  Guarded(context, [&] { k->op->start(k->state, context, done); }, done);
}

void StartAndWait(void* kernel, TF_OpKernelContext* context) {
  auto* k = static_cast<Kernel*>(kernel);
  auto finished = std::make_shared<std::promise<void>>();
  const Done done = [finished] { finished->set_value(); };
  Guarded(context, [&] { k->op->start(k->state, context, done); }, done);
  finished->get_future().wait();
}

void Destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// TensorFlow's create function has no argument of ours, so each op gets one of its own.
constexpr int kMaxOps = 16;
const OpDefinition* definitions[kMaxOps];

template <int kIndex>
void* Create(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>(Kernel{definitions[kIndex], nullptr});
  try {
    if (kernel->op->create != nullptr) kernel->state = kernel->op->create(construction);
  } catch (...) {
    TfStatus status;
    TheApi().SetStatus(status, TF_INTERNAL, CurrentException().ToString().c_str());
    TheApi().OpKernelConstruction_Failure(construction, status);
  }
  return kernel.release();
}

using CreateFunction = void* (*)(TF_OpKernelConstruction*);
template <int... kIndices>
CreateFunction CreateFor(int index, std::integer_sequence<int, kIndices...>) {
  static constexpr CreateFunction kFunctions[] = {&Create<kIndices>...};
  return kFunctions[index];
}

void RegisterKernel(const OpDefinition& op, CreateFunction create, const char* device) {
  TF_KernelBuilder* builder =
      op.compute != nullptr ? TheApi().NewKernelBuilder(op.name, device, create, &Compute, &Destroy)
      : CanRunAsync()
          ? TheApi().NewAsyncKernelBuilder(op.name, device, create, &StartAsync, &Destroy)
          : TheApi().NewKernelBuilder(op.name, device, create, &StartAndWait, &Destroy);
  if (std::string(device) == "GPU") {
    for (const auto* list : {&op.inputs, &op.outputs})
      for (const std::string argument : *list)
        TheApi().KernelBuilder_HostMemory(builder, argument.substr(0, argument.find(':')).c_str());
  }
  TfStatus status;
  TheApi().RegisterKernelBuilder((std::string(op.name) + device).c_str(), builder, status);
  status.ThrowIfError();
}

}  // namespace

void Register(const OpDefinition& op) {
  static int count = 0;
  const int index = count++;
  if (index >= kMaxOps) throw Error(Kind::kInternal, "more ops than kMaxOps");
  definitions[index] = &op;

  TF_OpDefinitionBuilder* builder = TheApi().NewOpDefinitionBuilder(op.name);
  for (const char* attr : op.attrs) TheApi().OpDefinitionBuilderAddAttr(builder, attr);
  for (const char* input : op.inputs) TheApi().OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : op.outputs) TheApi().OpDefinitionBuilderAddOutput(builder, output);
  // Not called with false: in some versions the call alone makes an op stateful.
  if (op.stateful) TheApi().OpDefinitionBuilderSetIsStateful(builder, true);
  TheApi().OpDefinitionBuilderSetShapeInferenceFunction(builder, op.shape);
  TfStatus status;
  TheApi().RegisterOpDefinition(builder, status);
  status.ThrowIfError();

  const CreateFunction create = CreateFor(index, std::make_integer_sequence<int, kMaxOps>());
  for (const char* device : {"CPU", "GPU"}) RegisterKernel(op, create, device);
}

}  // namespace gradred::tf
