// The slice of TensorFlow's C API that the ops use, declared by hand: building needs no TensorFlow,
// and one binary fits every version that exports these functions.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef GRADRED_TF_OFFICIAL_HEADERS  // tests/tensorflow/test_c_api.py compares with the official
                                     // ones
extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
struct TF_OpDefinitionBuilder;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
enum TF_DataType : unsigned {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT16 = 5,
  TF_INT8 = 6,
  TF_INT64 = 9,
  TF_BOOL = 10,
  TF_BFLOAT16 = 14,
  TF_UINT16 = 17,
  TF_HALF = 19,
  TF_UINT32 = 22,
  TF_UINT64 = 23
};
enum TF_Code : unsigned {
  TF_OK = 0,
  TF_INVALID_ARGUMENT = 3,
  TF_DEADLINE_EXCEEDED = 4,
  TF_RESOURCE_EXHAUSTED = 8,
  TF_FAILED_PRECONDITION = 9,
  TF_ABORTED = 10,
  TF_UNIMPLEMENTED = 12,
  TF_INTERNAL = 13,
  TF_UNAVAILABLE = 14
};
typedef unsigned char TF_Bool;
struct TF_StringView {
  const char* data;
  size_t len;
};
}
#endif

// X(return type, name without "TF_", arguments)
#define GRADRED_TF_FUNCTIONS(X)                                                               \
  X(TF_Status*, NewStatus, ())                                                                \
  X(void, DeleteStatus, (TF_Status*))                                                         \
  X(void, SetStatus, (TF_Status*, TF_Code, const char*))                                      \
  X(TF_Code, GetCode, (const TF_Status*))                                                     \
  X(const char*, Message, (const TF_Status*))                                                 \
  X(TF_Tensor*, NewTensor,                                                                    \
    (TF_DataType, const int64_t*, int, void*, size_t, void (*)(void*, size_t, void*), void*)) \
  X(void, DeleteTensor, (TF_Tensor*))                                                         \
  X(TF_DataType, TensorType, (const TF_Tensor*))                                              \
  X(int, NumDims, (const TF_Tensor*))                                                         \
  X(int64_t, Dim, (const TF_Tensor*, int))                                                    \
  X(void*, TensorData, (const TF_Tensor*))                                                    \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char*))                           \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                        \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                 \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))               \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                  \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction,                                       \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))               \
  X(TF_ShapeHandle*, NewShapeHandle, ())                                                      \
  X(void, DeleteShapeHandle, (TF_ShapeHandle*))                                               \
  X(TF_ShapeHandle*, ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                \
  X(void, ShapeInferenceContextGetInput,                                                      \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                            \
  X(void, ShapeInferenceContextSetOutput,                                                     \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                            \
  X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))      \
  X(TF_KernelBuilder*, NewKernelBuilder,                                                      \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                           \
     void (*)(void*, TF_OpKernelContext*), void (*)(void*)))                                  \
  X(TF_KernelBuilder*, NewAsyncKernelBuilder,                                                 \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                           \
     void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*)(void*)))   \
  X(void, KernelBuilder_HostMemory, (TF_KernelBuilder*, const char*))                         \
  X(void, RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                \
  X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))                      \
  X(int, NumInputs, (TF_OpKernelContext*))                                                    \
  X(int, NumOutputs, (TF_OpKernelContext*))                                                   \
  X(TF_DataType, ExpectedOutputDataType, (TF_OpKernelContext*, int))                          \
  X(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                      \
  X(void, SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                \
  X(TF_Tensor*, AllocateOutput,                                                               \
    (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*))         \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                                 \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))       \
  X(uint64_t, GetFrameId, (TF_OpKernelContext*))                                              \
  X(int64_t, GetIterId, (TF_OpKernelContext*))                                                \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                         \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))               \
  X(TF_StringView, OpKernelConstruction_GetName, (TF_OpKernelConstruction*))                  \
  X(void, OpKernelConstruction_GetAttrSize,                                                   \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                  \
  X(void, OpKernelConstruction_GetAttrInt64,                                                  \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                            \
  X(void, OpKernelConstruction_GetAttrInt64List,                                              \
    (TF_OpKernelConstruction*, const char*, int64_t*, int, TF_Status*))                       \
  X(void, OpKernelConstruction_GetAttrBool,                                                   \
    (TF_OpKernelConstruction*, const char*, TF_Bool*, TF_Status*))                            \
  X(void, OpKernelConstruction_GetAttrString,                                                 \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))

namespace gradred::tf {

struct Api {
#define GRADRED_TF_MEMBER(type, name, arguments) type(*name) arguments = nullptr;
  GRADRED_TF_FUNCTIONS(GRADRED_TF_MEMBER)
#undef GRADRED_TF_MEMBER
};

// The functions of the TensorFlow that this process has loaded. Throws kUnsupported naming what is
// missing.
const Api& TheApi();

}  // namespace gradred::tf
