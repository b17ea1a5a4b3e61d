#include "comm/nccl/nccl_api.h"

#include <vector>

#include "base/status.h"

namespace gradred::comm::nccl {
namespace {

template <class Function>
void Bind(const DynLib& library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(library.Require(name));
}

std::vector<std::string> NamesOf(const std::string& path, std::vector<std::string> usual) {
  return path.empty() ? std::move(usual) : std::vector<std::string>{path};
}

}  // namespace

std::shared_ptr<const Api> OpenApi(const std::string& nccl_path, const std::string& cudart_path) {
  const auto opened = std::make_shared<Api>();
  Api& api = *opened;
  api.cuda.library = DynLib::Open(NamesOf(
      cudart_path, {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}));
  api.nccl.library = DynLib::Open(NamesOf(nccl_path, {"libnccl.so.2", "libnccl.so"}));
#define GRADRED_BIND(Result, name, Arguments) Bind(api.cuda.library, #name, &api.cuda.name);
  GRADRED_CUDA_CALLS(GRADRED_BIND)
#undef GRADRED_BIND
#define GRADRED_BIND(Result, name, Arguments) Bind(api.nccl.library, #name, &api.nccl.name);
  GRADRED_NCCL_CALLS(GRADRED_BIND)
#undef GRADRED_BIND
  api.nccl.ncclGetLastError = reinterpret_cast<decltype(api.nccl.ncclGetLastError)>(
      api.nccl.library.Find("ncclGetLastError"));
  NCCL_CHECK(api, nullptr, ncclGetVersion, &api.nccl.version);
  CUDA_CHECK(api, cudaRuntimeGetVersion, &api.cuda.version);
  return opened;
}

void CheckNccl(const NcclApi& api, ncclComm_t comm, const char* call, ncclResult_t result) {
  if (result == kNcclSuccess) return;
  std::string text = std::string(call) + " failed with " + std::to_string(result) + " (" +
                     api.ncclGetErrorString(result) + ")";
  const char* const last = api.ncclGetLastError ? api.ncclGetLastError(comm) : nullptr;
  if (last && *last) text += ": " + std::string(last);
  throw Error(Kind::kTransportError, text);
}

void CheckCuda(const CudaApi& api, const char* call, cudaError_t error) {
  if (error == kCudaSuccess) return;
  throw Error(Kind::kTransportError, std::string(call) + " failed with " + std::to_string(error) +
                                         " (" + api.cudaGetErrorString(error) + ")");
}

}  // namespace gradred::comm::nccl
