// One rank's device, stream and NCCL communicator, kept alive by the works that use them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_api.h"

namespace gradred::comm::nccl {

// Rings from the driver's thread, for as long as there is a bell: after an abort nobody waits for
// the stream, whose last callbacks then come when the transport may be gone.
class Ringer {
 public:
  explicit Ringer(Doorbell& bell) : bell_(&bell) {}
  void Ring();
  void Forget();

 private:
  std::mutex mutex_;
  Doorbell* bell_;
};

class Device {
 public:
  // Local. `transport` must outlive this; its bell is rung when works finish, and its Abort ends
  // them.
  Device(std::shared_ptr<const Api> api, int device, Transport& transport, uint16_t channel);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Collective and blocking: ncclCommInitRank. `half_scale` multiplies the inputs of average_op.
  void Join(const ncclUniqueId& id, int rank, int size, float half_scale);

  // Makes the device current on the calling thread; throws the cause after an Abort of the
  // transport.
  void Enter();
  // The end of what has been put on the stream so far.
  WorkPtr Record(std::shared_ptr<Device> self, std::string what);

  const Api& api() const { return *api_; }
  const std::shared_ptr<const Api>& shared_api() const { return api_; }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  ncclRedOp_t average_op(DType half) const { return average_ops_[half == DType::kBfloat16]; }

 private:
  friend class DeviceWork;
  void ThrowIfAborted();
  void ThrowIfFailed(const std::string& what);
  void AbortComm();
  void Close();

  const std::shared_ptr<const Api> api_;
  const int device_;
  Transport& transport_;
  const std::shared_ptr<Ringer> ringer_;
  const Tag watch_tag_;
  WorkPtr watch_;  // a receive from oneself that is never sent: it finishes when the transport is
                   // aborted
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  ncclRedOp_t average_ops_[2] = {kNcclSum, kNcclSum};
  bool has_average_ops_ = false;
  bool broken_ = false;
  std::vector<cudaEvent_t> free_events_;
};

// Device memory; may outlive `device`. Throws kUnsupported with sizes when there is no room.
SegmentPtr MakeDeviceSegment(Device& device, int64_t nbytes);

}  // namespace gradred::comm::nccl
