// Memory that works of one communicator hand on: fresh pages cost more than what is done in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "base/graveyard.h"
#include "reduce/layout.h"

namespace gradred::comm {

struct AlignedFree {
  void operator()(char* p) const { ::operator delete(p, std::align_val_t(reduce::kAlign)); }
};
using AlignedBytes = std::unique_ptr<char[], AlignedFree>;
inline AlignedBytes MakeAlignedBytes(int64_t nbytes) {
  return AlignedBytes(static_cast<char*>(
      ::operator new(static_cast<size_t>(nbytes), std::align_val_t(reduce::kAlign))));
}

// Used by one thread.
class BufferPool {
 public:
  // Returns to its pool when destroyed.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&&) = default;
    Buffer& operator=(Buffer&& other) {
      GiveBack();
      pool_ = std::move(other.pool_);
      bytes_ = std::move(other.bytes_);
      nbytes_ = other.nbytes_;
      return *this;
    }
    ~Buffer() { GiveBack(); }
    char* data() const { return bytes_.get(); }
    void GiveBack() {
      if (bytes_ == nullptr) return;
      if (pool_ == nullptr)
        bytes_.reset();
      else
        pool_->Keep(std::move(bytes_), nbytes_);
    }
    // After a failure somebody may still write to it.
    void BuryIt() { Bury(bytes_); }

   private:
    friend class BufferPool;
    std::shared_ptr<BufferPool> pool_;
    AlignedBytes bytes_;
    int64_t nbytes_ = 0;
  };

  // Aligned to reduce::kAlign; a null pool: fresh memory that is freed.
  static Buffer Take(const std::shared_ptr<BufferPool>& pool, int64_t nbytes) {
    Buffer buffer;
    if (nbytes <= 0) return buffer;
    if (pool != nullptr) {
      auto best = pool->kept_.end();
      for (auto b = pool->kept_.begin(); b != pool->kept_.end(); ++b) {
        const bool fits = b->nbytes >= nbytes && b->nbytes <= kWaste * nbytes;
        if (fits && (best == pool->kept_.end() || b->nbytes < best->nbytes)) best = b;
      }
      if (best != pool->kept_.end()) {
        buffer.bytes_ = std::move(best->bytes);
        buffer.nbytes_ = best->nbytes;
        pool->kept_nbytes_ -= best->nbytes;
        pool->kept_.erase(best);
      }
    }
    if (buffer.bytes_ == nullptr) {
      buffer.nbytes_ = reduce::AlignUp(nbytes);
      buffer.bytes_ = MakeAlignedBytes(buffer.nbytes_);
    }
    buffer.pool_ = pool;
    return buffer;
  }

  int64_t kept_nbytes() const { return kept_nbytes_; }

 private:
  struct Kept {
    AlignedBytes bytes;
    int64_t nbytes;
  };
  static constexpr int64_t kLimit = 16 << 20;  // bytes kept
  static constexpr size_t kCount = 64;
  static constexpr int64_t kWaste = 4;

  // The oldest go first.
  void Keep(AlignedBytes bytes, int64_t nbytes) {
    if (nbytes > kLimit) return;
    kept_.push_back({std::move(bytes), nbytes});
    kept_nbytes_ += nbytes;
    while (kept_nbytes_ > kLimit || kept_.size() > kCount) {
      kept_nbytes_ -= kept_.front().nbytes;
      kept_.erase(kept_.begin());
    }
  }

  std::vector<Kept> kept_;
  int64_t kept_nbytes_ = 0;
};

}  // namespace gradred::comm
