// NCCL and the CUDA runtime, opened at run time: the types and calls used here, declared by hand,
// so that nothing of CUDA is needed to build. Both libraries keep these signatures across major
// versions.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/dynlib.h"

namespace gradred::comm::nccl {

// --- NCCL: nccl.h, from 2.11 (ncclRedOpCreatePreMulSum) ---
struct CommHandle;
using ncclComm_t = CommHandle*;
struct ncclUniqueId {
  char internal[128];
};
using ncclResult_t = int;
using ncclDataType_t = int;
using ncclRedOp_t = int;
constexpr ncclResult_t kNcclSuccess = 0, kNcclInProgress = 7;
constexpr ncclDataType_t kNcclInt8 = 0, kNcclUint8 = 1, kNcclInt32 = 2, kNcclUint32 = 3,
                         kNcclInt64 = 4, kNcclUint64 = 5, kNcclFloat16 = 6, kNcclFloat32 = 7,
                         kNcclFloat64 = 8, kNcclBfloat16 = 9;
constexpr ncclRedOp_t kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3;
constexpr int kNcclScalarHostImmediate = 1;

// --- CUDA runtime: cuda_runtime_api.h ---
struct StreamHandle;
struct EventHandle;
using cudaStream_t = StreamHandle*;
using cudaEvent_t = EventHandle*;
using cudaError_t = int;
using cudaHostFn_t = void (*)(void*);
constexpr cudaError_t kCudaSuccess = 0, kCudaErrorMemoryAllocation = 2, kCudaErrorNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1, kCudaEventDisableTiming = 2;
constexpr int kCudaMemcpyDefault = 4;  // the direction follows from the addresses

#define GRADRED_NCCL_CALLS(X)                                                                    \
  X(ncclResult_t, ncclGetVersion, (int* version))                                                \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id))                                          \
  X(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank))  \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))                                            \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm))                                              \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t * error))                \
  X(const char*, ncclGetErrorString, (ncclResult_t result))                                      \
  X(ncclResult_t, ncclRedOpCreatePreMulSum,                                                      \
    (ncclRedOp_t * op, void* scalar, ncclDataType_t type, int residence, ncclComm_t comm))       \
  X(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))                           \
  X(ncclResult_t, ncclAllReduce,                                                                 \
    (const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,            \
     ncclComm_t comm, cudaStream_t stream))                                                      \
  X(ncclResult_t, ncclReduceScatter,                                                             \
    (const void* send, void* recv, size_t recv_count, ncclDataType_t type, ncclRedOp_t op,       \
     ncclComm_t comm, cudaStream_t stream))                                                      \
  X(ncclResult_t, ncclReduce,                                                                    \
    (const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,  \
     ncclComm_t comm, cudaStream_t stream))                                                      \
  X(ncclResult_t, ncclAllGather,                                                                 \
    (const void* send, void* recv, size_t send_count, ncclDataType_t type, ncclComm_t comm,      \
     cudaStream_t stream))                                                                       \
  X(ncclResult_t, ncclBroadcast,                                                                 \
    (const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, \
     cudaStream_t stream))                                                                       \
  X(ncclResult_t, ncclGroupStart, ())                                                            \
  X(ncclResult_t, ncclGroupEnd, ())

#define GRADRED_CUDA_CALLS(X)                                                            \
  X(cudaError_t, cudaRuntimeGetVersion, (int* version))                                  \
  X(cudaError_t, cudaGetDeviceCount, (int* count))                                       \
  X(cudaError_t, cudaSetDevice, (int device))                                            \
  X(cudaError_t, cudaMalloc, (void** data, size_t nbytes))                               \
  X(cudaError_t, cudaFree, (void* data))                                                 \
  X(cudaError_t, cudaMemcpyAsync,                                                        \
    (void* dst, const void* src, size_t nbytes, int kind, cudaStream_t stream))          \
  X(cudaError_t, cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags))     \
  X(cudaError_t, cudaStreamDestroy, (cudaStream_t stream))                               \
  X(cudaError_t, cudaStreamSynchronize, (cudaStream_t stream))                           \
  X(cudaError_t, cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags))        \
  X(cudaError_t, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream))              \
  X(cudaError_t, cudaEventQuery, (cudaEvent_t event))                                    \
  X(cudaError_t, cudaEventDestroy, (cudaEvent_t event))                                  \
  X(cudaError_t, cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t fn, void* data)) \
  X(const char*, cudaGetErrorString, (cudaError_t error))

#define GRADRED_MEMBER(Result, name, Arguments) Result(*name) Arguments = nullptr;
struct NcclApi {
  DynLib library;
  int version = 0;  // 22304 is 2.23.4
  GRADRED_NCCL_CALLS(GRADRED_MEMBER)
  const char* (*ncclGetLastError)(ncclComm_t comm) = nullptr;  // null before 2.13
};
struct CudaApi {
  DynLib library;
  int version = 0;  // 12040 is 12.4
  GRADRED_CUDA_CALLS(GRADRED_MEMBER)
};
#undef GRADRED_MEMBER

struct Api {
  NcclApi nccl;
  CudaApi cuda;
};

// Empty paths: the libraries of the process or of the system by their usual names. Opens, fills the
// tables and reads the versions; throws kUnsupported naming library and symbol, or what was tried.
// The libraries stay open.
std::shared_ptr<const Api> OpenApi(const std::string& nccl_path, const std::string& cudart_path);

// Throw kTransportError with call, code and text unless the call succeeded.
void CheckNccl(const NcclApi& api, ncclComm_t comm, const char* call, ncclResult_t result);
void CheckCuda(const CudaApi& api, const char* call, cudaError_t error);

// NCCL_CHECK(api, handle, ncclAllReduce, arguments...): `handle` is asked for the text of the last
// error, may be null.
#define NCCL_CHECK(api, handle, call, ...) \
  ::gradred::comm::nccl::CheckNccl((api).nccl, handle, #call, (api).nccl.call(__VA_ARGS__))
#define CUDA_CHECK(api, call, ...) \
  ::gradred::comm::nccl::CheckCuda((api).cuda, #call, (api).cuda.call(__VA_ARGS__))

}  // namespace gradred::comm::nccl
