// The CUDA runtime's C interface on host memory, for tests: four devices, a thread for each stream.
// It is stricter than the original: what that forgives or leaves undefined is an error here.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "standin.h"

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDevice = 101,
              kInvalidHandle = 400, kNotReady = 600;
constexpr int kDevices = 4;
constexpr size_t kDeviceNbytes = size_t{1} << 30;

thread_local int current_device = 0;

class Stream {
 public:
  explicit Stream(int device) : device_(device), worker_([this] { Run(); }) {}
  ~Stream() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }
  int device() const { return device_; }
  void Enqueue(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }
  void Synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()>& task = tasks_.front();
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();  // only now, for Synchronize
      changed_.notify_all();
    }
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread worker_;
};

struct Event {
  int device = 0;
  std::atomic<uint64_t> recorded{0}, passed{0};
};

struct Memory {
  size_t nbytes = 0;
  int device = -1;  // -1: pinned host memory
};

struct Registry {
  std::mutex mutex;
  std::map<const char*, Memory> memory;
  std::map<const void*, std::shared_ptr<Stream>> streams;
  std::map<const void*, std::shared_ptr<Event>> events;
  size_t used[kDevices] = {};
};
// Never destroyed: threads of streams that nobody destroyed may still be running at exit.
Registry& Global() {
  static Registry* const registry = new Registry;
  return *registry;
}

template <class T>
std::shared_ptr<T> Find(const std::map<const void*, std::shared_ptr<T>>& live, const void* handle) {
  const std::lock_guard<std::mutex> lock(Global().mutex);
  const auto found = live.find(handle);
  return found == live.end() ? nullptr : found->second;
}
std::shared_ptr<Stream> FindStream(const void* stream) { return Find(Global().streams, stream); }
std::shared_ptr<Event> FindEvent(const void* event) { return Find(Global().events, event); }

// The device of the allocation that holds [data, data + nbytes): -1 pinned, -2 none.
int DeviceOf(const void* data, size_t nbytes) {
  Registry& g = Global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  const char* const at = static_cast<const char*>(data);
  auto next = g.memory.upper_bound(at);
  if (next == g.memory.begin()) return -2;
  --next;
  return at + nbytes <= next->first + next->second.nbytes ? next->second.device : -2;
}

int Allocate(void** data, size_t nbytes, int device) {
  if (!data || nbytes == 0) return kInvalidValue;
  Registry& g = Global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  if (device >= 0 && nbytes > kDeviceNbytes - g.used[device]) return kMemoryAllocation;
  *data = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
  if (!*data) return kMemoryAllocation;
  std::memset(*data, 0xcd, nbytes);  // nobody shall count on zeros
  if (device >= 0) g.used[device] += nbytes;
  g.memory[static_cast<const char*>(*data)] = {nbytes, device};
  return kSuccess;
}

int Free(void* data, bool on_device) {
  if (!data) return kSuccess;
  Registry& g = Global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  const auto found = g.memory.find(static_cast<const char*>(data));
  if (found == g.memory.end() || (found->second.device >= 0) != on_device) return kInvalidValue;
  if (on_device) g.used[found->second.device] -= found->second.nbytes;
  g.memory.erase(found);
  std::free(data);
  return kSuccess;
}

}  // namespace

extern "C" {

int StandinCurrentDevice() { return current_device; }
int StandinStreamDevice(const void* stream) {
  const auto found = FindStream(stream);
  return found ? found->device() : -1;
}
bool StandinIsDeviceMemory(const void* data, size_t nbytes, int device) {
  return DeviceOf(data, nbytes) == device;
}
void StandinEnqueue(void* stream, void (*fn)(void*), void* data) {
  FindStream(stream)->Enqueue([fn, data] { fn(data); });
}
int StandinCudaLive() {
  Registry& g = Global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  return static_cast<int>(g.memory.size() + g.streams.size() + g.events.size());
}

int cudaRuntimeGetVersion(int* version) {
  if (!version) return kInvalidValue;
  *version = 12000;
  return kSuccess;
}
int cudaGetDeviceCount(int* count) {
  if (!count) return kInvalidValue;
  *count = kDevices;
  return kSuccess;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  current_device = device;
  return kSuccess;
}

int cudaMalloc(void** data, size_t nbytes) { return Allocate(data, nbytes, current_device); }
int cudaFree(void* data) { return Free(data, true); }
int cudaMallocHost(void** data, size_t nbytes) { return Allocate(data, nbytes, -1); }
int cudaFreeHost(void* data) { return Free(data, false); }

// kind 1: to the device, 2: to the host, 3: in the device, 4: by the addresses.
int cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, int kind, void* stream) {
  const auto found = FindStream(stream);
  if (!found) return kInvalidHandle;
  if (nbytes == 0) return kSuccess;
  const bool to_device = DeviceOf(dst, nbytes) >= 0, from_device = DeviceOf(src, nbytes) >= 0;
  if (!dst || !src || kind < 1 || kind > 4) return kInvalidValue;
  if (kind != 4 && (to_device != (kind != 2) || from_device != (kind != 1))) return kInvalidValue;
  found->Enqueue([=] { std::memcpy(dst, src, nbytes); });
  return kSuccess;
}

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  if (!stream || flags > 1) return kInvalidValue;
  const auto made = std::make_shared<Stream>(current_device);
  *stream = made.get();
  const std::lock_guard<std::mutex> lock(Global().mutex);
  Global().streams[*stream] = made;
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  const auto found = FindStream(stream);
  if (!found) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(Global().mutex);
  Global().streams.erase(stream);
  return kSuccess;  // the last reference joins the thread, after the lock is gone
}
int cudaStreamSynchronize(void* stream) {
  const auto found = FindStream(stream);
  if (!found) return kInvalidHandle;
  found->Synchronize();
  return kSuccess;
}
int cudaLaunchHostFunc(void* stream, void (*fn)(void*), void* data) {
  const auto found = FindStream(stream);
  if (!found || !fn) return found ? kInvalidValue : kInvalidHandle;
  found->Enqueue([fn, data] { fn(data); });
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned flags) {
  if (!event || flags > 7) return kInvalidValue;
  const auto made = std::make_shared<Event>();
  made->device = current_device;
  *event = made.get();
  const std::lock_guard<std::mutex> lock(Global().mutex);
  Global().events[*event] = made;
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  const auto found = FindEvent(event);
  const auto on = FindStream(stream);
  if (!found || !on || found->device != on->device()) return kInvalidHandle;
  const uint64_t number = ++found->recorded;
  on->Enqueue([found, number] { found->passed = number; });
  return kSuccess;
}
int cudaEventQuery(void* event) {
  const auto found = FindEvent(event);
  if (!found) return kInvalidHandle;
  return found->passed == found->recorded ? kSuccess : kNotReady;
}
int cudaEventDestroy(void* event) {
  const std::lock_guard<std::mutex> lock(Global().mutex);
  return Global().events.erase(event) ? kSuccess : kInvalidHandle;
}

const char* cudaGetErrorString(int error) {
  switch (error) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kMemoryAllocation:
      return "out of memory";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kInvalidHandle:
      return "invalid resource handle";
    case kNotReady:
      return "device not ready";
  }
  return "unrecognized error code";
}

}  // extern "C"
