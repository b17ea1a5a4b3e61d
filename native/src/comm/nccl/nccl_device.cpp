#include "comm/nccl/nccl_device.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "base/status.h"

namespace gradred::comm::nccl {

// Finished when the stream has passed the event. The owner may sleep: a host function behind the
// event rings its bell.
class DeviceWork : public Work {
 public:
  DeviceWork(std::shared_ptr<Device> device, cudaEvent_t event, std::string what)
      : device_(std::move(device)), event_(event), what_(std::move(what)) {}
  ~DeviceWork() override {
    if (event_) device_->free_events_.push_back(event_);
  }

 private:
  bool Advance() override {
    device_->ThrowIfAborted();
    const cudaError_t state = device_->api_->cuda.cudaEventQuery(event_);
    if (state == kCudaErrorNotReady) {
      device_->ThrowIfFailed(what_);
      return false;
    }
    CheckCuda(device_->api_->cuda, ("cudaEventQuery for " + what_).c_str(), state);
    // An operation that gives up leaves the stream like one that succeeds.
    device_->ThrowIfFailed(what_);
    device_->free_events_.push_back(event_);
    event_ = nullptr;
    return true;
  }

  const std::shared_ptr<Device> device_;
  cudaEvent_t event_;
  const std::string what_;
};

Device::Device(std::shared_ptr<const Api> api, int device, Transport& transport, uint16_t channel)
    : api_(std::move(api)),
      device_(device),
      transport_(transport),
      ringer_(std::make_shared<Ringer>(transport.bell())),
      watch_tag_{channel, 0} {
  int count = 0;
  CUDA_CHECK(*api_, cudaGetDeviceCount, &count);
  if (device < 0 || device >= count) {
    throw Error(Kind::kUnsupported, "CUDA device " + std::to_string(device) +
                                        ": this process sees " + std::to_string(count) +
                                        " device(s)");
  }
  CUDA_CHECK(*api_, cudaSetDevice, device_);
  CUDA_CHECK(*api_, cudaStreamCreateWithFlags, &stream_, kCudaStreamNonBlocking);
  watch_ = transport_.Recv(transport_.rank(), watch_tag_, nullptr, 0);
}

void Device::Join(const ncclUniqueId& id, int rank, int size, float half_scale) {
  Enter();
  NCCL_CHECK(*api_, nullptr, ncclCommInitRank, &comm_, size, id, rank);
  Float16 float16 = ToFloat16(half_scale);
  Bfloat16 bfloat16 = ToBfloat16(half_scale);
  NCCL_CHECK(*api_, comm_, ncclRedOpCreatePreMulSum, &average_ops_[0], &float16, kNcclFloat16,
             kNcclScalarHostImmediate, comm_);
  NCCL_CHECK(*api_, comm_, ncclRedOpCreatePreMulSum, &average_ops_[1], &bfloat16, kNcclBfloat16,
             kNcclScalarHostImmediate, comm_);
  has_average_ops_ = true;
}

void Ringer::Ring() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bell_) bell_->Ring();
}

void Ringer::Forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  bell_ = nullptr;
}

Device::~Device() {
  try {
    Close();
  } catch (...) {
    // The process keeps what could not be freed; there is nobody to tell.
  }
  ringer_->Forget();
}

void Device::Close() {
  if (watch_->Poll()) AbortComm();
  if (broken_) return;  // no call reaches the libraries after an abort
  // Finishes the receive, so that the transport has nothing left of this communicator.
  const WorkPtr send = transport_.Send(transport_.rank(), watch_tag_, nullptr, 0);
  (void)Wait(*watch_, transport_, kSecond, "the end of an NCCL communicator");
  (void)Wait(*send, transport_, kSecond, "the end of an NCCL communicator");
  CUDA_CHECK(*api_, cudaSetDevice, device_);
  CUDA_CHECK(*api_, cudaStreamSynchronize, stream_);
  for (const cudaEvent_t event : free_events_) CUDA_CHECK(*api_, cudaEventDestroy, event);
  if (has_average_ops_) {
    for (const ncclRedOp_t op : average_ops_) NCCL_CHECK(*api_, comm_, ncclRedOpDestroy, op, comm_);
  }
  if (comm_) NCCL_CHECK(*api_, nullptr, ncclCommDestroy, comm_);
  CUDA_CHECK(*api_, cudaStreamDestroy, stream_);
}

void Device::Enter() {
  ThrowIfAborted();
  CUDA_CHECK(*api_, cudaSetDevice, device_);
}

WorkPtr Device::Record(std::shared_ptr<Device> self, std::string what) {
  cudaEvent_t event = nullptr;
  if (free_events_.empty()) {
    CUDA_CHECK(*api_, cudaEventCreateWithFlags, &event, kCudaEventDisableTiming);
  } else {
    event = free_events_.back();
    free_events_.pop_back();
  }
  auto work = std::make_unique<DeviceWork>(std::move(self), event, std::move(what));
  CUDA_CHECK(*api_, cudaEventRecord, event, stream_);
  auto ringer = std::make_unique<std::shared_ptr<Ringer>>(ringer_);
  const auto ring = [](void* data) {
    const std::unique_ptr<std::shared_ptr<Ringer>> mine(
        static_cast<std::shared_ptr<Ringer>*>(data));
    (*mine)->Ring();
  };
  CUDA_CHECK(*api_, cudaLaunchHostFunc, stream_, ring, ringer.get());
  (void)ringer.release();  // the callback's
  return work;
}

void Device::ThrowIfAborted() {
  if (!watch_->Poll()) return;
  AbortComm();
  ThrowIfError(watch_->status());
}

void Device::ThrowIfFailed(const std::string& what) {
  ncclResult_t failure = kNcclSuccess;
  NCCL_CHECK(*api_, comm_, ncclCommGetAsyncError, comm_, &failure);
  if (failure == kNcclSuccess || failure == kNcclInProgress) return;
  Status status;
  try {
    CheckNccl(api_->nccl, comm_, what.c_str(), failure);
  } catch (const Error& error) {
    status = error.status();
  }
  AbortComm();  // else its kernels wait for ever
  throw Error(status);
}

// Ends the kernels that wait for peers.
void Device::AbortComm() {
  if (broken_) return;
  broken_ = true;
  if (comm_) (void)api_->nccl.ncclCommAbort(comm_);
}

namespace {

class DeviceSegment : public Segment {
 public:
  DeviceSegment(Device& device, int64_t nbytes) : api_(device.shared_api()), nbytes_(nbytes) {
    device.Enter();
    const CudaApi& cuda = api_->cuda;
    const cudaError_t error =
        cuda.cudaMalloc(&data_, static_cast<size_t>(std::max(nbytes, reduce::kAlign)));
    if (error == kCudaErrorMemoryAllocation) {
      throw Error(Kind::kUnsupported, "no device memory for a segment of " +
                                          std::to_string(nbytes) + " bytes (" +
                                          cuda.cudaGetErrorString(error) +
                                          "); use smaller fusion buffers or a smaller batch");
    }
    CheckCuda(cuda, "cudaMalloc", error);
  }
  ~DeviceSegment() override {
    if (data_) (void)api_->cuda.cudaFree(data_);
  }
  void* data() override { return data_; }
  int64_t nbytes() const override { return nbytes_; }
  Space space() const override { return Space::kDevice; }

 private:
  const std::shared_ptr<const Api> api_;
  const int64_t nbytes_;
  void* data_ = nullptr;
};

}  // namespace

SegmentPtr MakeDeviceSegment(Device& device, int64_t nbytes) {
  if (nbytes < 0) {
    throw Error(Kind::kInvalidArgument,
                "a segment of " + std::to_string(nbytes) + " bytes: expected 0 or more");
  }
  return std::make_unique<DeviceSegment>(device, nbytes);
}

}  // namespace gradred::comm::nccl
