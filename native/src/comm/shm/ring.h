// A stream of bytes from one process to another: a ring in shared memory with one writer and one
// reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace gradred::comm::shm {

// Zero-initialised memory is an empty ring. `capacity` bytes follow it.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> written{0};  // bytes ever; by the writer
  alignas(64) std::atomic<uint64_t> read{0};     // bytes ever; by the reader
  alignas(64) std::atomic<uint32_t> writer_waits{0};
};

class RingWriter {
 public:
  RingWriter(RingHeader* ring, int64_t capacity)
      : ring_(ring),
        bytes_(reinterpret_cast<char*>(ring + 1)),
        capacity_(capacity),
        written_(ring->written.load(std::memory_order_relaxed)) {}

  // Sequentially consistent as AskForSpace and Release: either this sees the space or the reader
  // sees the request.
  int64_t Free() const {
    return capacity_ - static_cast<int64_t>(written_ - ring_->read.load(std::memory_order_seq_cst));
  }
  // nbytes <= Free(). Not seen by the reader before Publish().
  void Write(const void* data, int64_t nbytes) {
    const int64_t at = static_cast<int64_t>(written_ % static_cast<uint64_t>(capacity_));
    const int64_t first = std::min(nbytes, capacity_ - at);
    std::memcpy(bytes_ + at, data, static_cast<size_t>(first));
    std::memcpy(bytes_, static_cast<const char*>(data) + first,
                static_cast<size_t>(nbytes - first));
    written_ += static_cast<uint64_t>(nbytes);
  }
  void Publish() { ring_->written.store(written_, std::memory_order_release); }
  // Asks for a ring of the bell when the reader frees space; look at Free() once more afterwards.
  void AskForSpace() { ring_->writer_waits.store(1, std::memory_order_seq_cst); }

 private:
  RingHeader* ring_;
  char* bytes_;
  int64_t capacity_;
  uint64_t written_;
};

class RingReader {
 public:
  RingReader(RingHeader* ring, int64_t capacity)
      : ring_(ring),
        bytes_(reinterpret_cast<const char*>(ring + 1)),
        capacity_(capacity),
        read_(ring->read.load(std::memory_order_relaxed)) {}

  int64_t Available() const {
    return static_cast<int64_t>(ring_->written.load(std::memory_order_acquire) - read_);
  }
  // nbytes <= Available(). A null `data` skips them.
  void Read(void* data, int64_t nbytes) {
    if (data != nullptr) {
      const int64_t at = static_cast<int64_t>(read_ % static_cast<uint64_t>(capacity_));
      const int64_t first = std::min(nbytes, capacity_ - at);
      std::memcpy(data, bytes_ + at, static_cast<size_t>(first));
      std::memcpy(static_cast<char*>(data) + first, bytes_, static_cast<size_t>(nbytes - first));
    }
    read_ += static_cast<uint64_t>(nbytes);
  }
  // Gives the space of what was read back. True: the writer waits for it and must be woken.
  bool Release() {
    ring_->read.store(read_, std::memory_order_seq_cst);
    return ring_->writer_waits.load(std::memory_order_seq_cst) != 0 &&
           ring_->writer_waits.exchange(0, std::memory_order_seq_cst) != 0;
  }

 private:
  RingHeader* ring_;
  const char* bytes_;
  int64_t capacity_;
  uint64_t read_;
};

}  // namespace gradred::comm::shm
