// What the benchmarks need of the machine itself: a barrier of processes, the bare copy loop that
// reductions are compared with, the bandwidth of copies, and work of a known amount.
//
// C interface, called by benchmarks/bench/native.py through ctypes. Every function may be called by
// one thread of a rank at a time. Built with -O3 -march=native: it is the machine's best.

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

constexpr size_t kHeaderNbytes = 4096;
// Elements that are summed before they are written to all slots: they stay in the first cache.
constexpr size_t kBlock = 2048;

struct alignas(64) Barrier {
  std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> generation;
};

struct Region {
  int rank, size, spins;
  size_t slot_nbytes, nbytes;
  char* memory;
  Barrier* barrier() { return reinterpret_cast<Barrier*>(memory); }
  char* slot(int rank) { return memory + kHeaderNbytes + rank * slot_nbytes; }
};

void Wait(Region* region) {
  Barrier* barrier = region->barrier();
  const uint32_t generation = barrier->generation.load(std::memory_order_relaxed);
  if (barrier->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<uint32_t>(region->size)) {
    barrier->arrived.store(0, std::memory_order_relaxed);
    barrier->generation.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; barrier->generation.load(std::memory_order_acquire) == generation; ++spin) {
    if (spin < region->spins) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}

// Sums elements [begin, end) of all slots into all slots. Integers stand for halves: the same bytes
// without their arithmetic.
template <class T>
void SumPart(Region* region, size_t begin, size_t end) {
  T sum[kBlock];
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    std::memcpy(sum, reinterpret_cast<T*>(region->slot(0)) + at, count * sizeof(T));
    for (int rank = 1; rank < region->size; ++rank) {
      const T* __restrict other = reinterpret_cast<T*>(region->slot(rank)) + at;
      for (size_t i = 0; i < count; ++i) sum[i] = static_cast<T>(sum[i] + other[i]);
    }
    for (int rank = 0; rank < region->size; ++rank) {
      std::memcpy(reinterpret_cast<T*>(region->slot(rank)) + at, sum, count * sizeof(T));
    }
  }
}

template <class T>
void CopyLoop(Region* region, T* tensor, size_t count) {
  // Parts begin at whole cache lines.
  const size_t line = 64 / sizeof(T);
  const size_t part = ((count + region->size - 1) / region->size + line - 1) / line * line;
  const size_t begin = std::min(count, part * region->rank);
  const size_t end = std::min(count, begin + part);
  char* slot = region->slot(region->rank);
  std::memcpy(slot, tensor, count * sizeof(T));
  Wait(region);
  SumPart<T>(region, begin, end);
  Wait(region);
  std::memcpy(tensor, slot, count * sizeof(T));
}

// Until `turn` is what it should be, asleep in between.
void SleepUntil(std::atomic<uint32_t>* turn, uint32_t wished) {
  for (uint32_t seen = turn->load(); seen != wished; seen = turn->load())
    syscall(SYS_futex, turn, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void Give(std::atomic<uint32_t>* turn, uint32_t to) {
  turn->store(to);
  syscall(SYS_futex, turn, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace

extern "C" {

// Maps the file of that path, made if it is missing, for `size` slots; all ranks give the same
// sizes. Null if the system refuses.
void* bench_open(const char* path, int rank, int size, size_t slot_nbytes) {
  auto* region = new Region{rank, size, 0, (slot_nbytes + 4095) / 4096 * 4096, 0, nullptr};
  region->spins = size <= sysconf(_SC_NPROCESSORS_ONLN) ? 4000 : 0;
  region->nbytes = kHeaderNbytes + size * region->slot_nbytes;
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* memory = MAP_FAILED;
  if (file >= 0 && ftruncate(file, static_cast<off_t>(region->nbytes)) == 0) {
    memory = mmap(nullptr, region->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) {
    delete region;
    return nullptr;
  }
  region->memory = static_cast<char*>(memory);
  std::memset(region->slot(rank), 0, region->slot_nbytes);
  return region;
}

void bench_close(void* handle) {
  auto* region = static_cast<Region*>(handle);
  munmap(region->memory, region->nbytes);
  delete region;
}

// Returns when all ranks have called it.
void bench_barrier(void* handle) { Wait(static_cast<Region*>(handle)); }

// Pack, sum, unpack of `count` elements that are `width` bytes wide: 4 is float32, 2 any half. In
// place.
void bench_copy_loop(void* handle, void* tensor, size_t count, int width) {
  auto* region = static_cast<Region*>(handle);
  if (width == 4) {
    CopyLoop(region, static_cast<float*>(tensor), count);
  } else {
    CopyLoop(region, static_cast<uint16_t*>(tensor), count);
  }
}

void bench_copy(void* to, const void* from, size_t nbytes) { std::memcpy(to, from, nbytes); }

// Two threads wake each other in turn, 2 * count times: what it takes to hand work to a thread that
// sleeps.
void bench_hand_over(int count) {
  std::atomic<uint32_t> turn{0};
  std::thread other([&turn, count] {
    for (int i = 0; i < count; ++i) {
      SleepUntil(&turn, 1);
      Give(&turn, 0);
    }
  });
  for (int i = 0; i < count; ++i) {
    Give(&turn, 1);
    SleepUntil(&turn, 0);
  }
  other.join();
}

// McCalpin's triad, a = b + scale * c: 24 bytes an element are counted.
void bench_triad(double* a, const double* b, const double* c, double scale, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] + scale * c[i];
}

}  // extern "C"
