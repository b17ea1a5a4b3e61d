#include "base/page_pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace gradred {
namespace {

constexpr Nanos kPeriod = 10 * kSecond;
constexpr int64_t kHugePage = 2 << 20;

// Large buffers start at a boundary of huge pages and ask for them: one fault instead of 512 where
// the system grants it. On virtual machines the first touch may take longer so (the host has given
// up what the guest left free), and every later pass over the buffer less, up to half.
void* Map(int64_t nbytes) {
  const int64_t more = nbytes >= kHugePage ? kHugePage : 0;
  void* const data = mmap(nullptr, static_cast<size_t>(nbytes + more), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  if (more == 0) return data;
  char* const begin = static_cast<char*>(data);
  const int64_t before = (kHugePage - reinterpret_cast<int64_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  if (before < more) munmap(begin + before + nbytes, static_cast<size_t>(more - before));
  madvise(begin + before, static_cast<size_t>(nbytes), MADV_HUGEPAGE);  // or not
  return begin + before;
}

}  // namespace

PagePool& PagePool::The() {
  static auto* pool = new PagePool;
  return *pool;
}

PagePool::PagePool() {
  // A child must not inherit a mutex that a thread of the parent holds.
  pthread_atfork([] { The().mutex_.lock(); }, [] { The().mutex_.unlock(); },
                 [] { The().mutex_.unlock(); });
}

// Four classes from each power of two to the next. The part of a buffer that nobody asked for is
// never touched, so it is no memory.
int64_t PagePool::ClassOf(int64_t nbytes) {
  int64_t power = kLeast;
  while (power <= nbytes / 2) power *= 2;
  const int64_t step = power / 4;
  return (nbytes + step - 1) / step * step;
}

void* PagePool::Take(int64_t nbytes) {
  if (nbytes < kLeast)
    return std::aligned_alloc(64,
                              static_cast<size_t>((std::max<int64_t>(nbytes, 1) + 63) / 64 * 64));
  const int64_t size = ClassOf(nbytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Age(Now());
    const auto found = idle_.find(size);
    if (found != idle_.end()) {
      void* const data = found->second.back().data;
      found->second.pop_back();
      if (found->second.empty()) idle_.erase(found);
      stats_.idle_nbytes -= size;
      ++stats_.reused;
      Use(size);
      return data;
    }
  }
  void* data = Map(size);
  if (data == nullptr) {
    Release();
    data = Map(size);
  }
  if (data == nullptr) return nullptr;
  std::vector<Pages> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.fresh;
    Use(size);
    unused = Shrink(Limit());
  }
  Unmap(unused);
  return data;
}

void PagePool::Use(int64_t nbytes) {
  stats_.used_nbytes += nbytes;
  most_ = std::max(most_, stats_.used_nbytes);
}

void PagePool::Give(void* data, int64_t nbytes) {
  if (nbytes < kLeast) return std::free(data);
  const int64_t size = ClassOf(nbytes);
  std::vector<Pages> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Age(Now());
    stats_.used_nbytes -= size;
    stats_.idle_nbytes += size;
    idle_[size].push_back({data, gives_++});
    unused = Shrink(Limit());
  }
  Unmap(unused);
}

void PagePool::Trim(Nanos now) {
  std::vector<Pages> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stats_.idle_nbytes == 0) return;
    Age(now);
    unused = Shrink(Limit());
  }
  Unmap(unused);
}

void PagePool::Release() {
  std::vector<Pages> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    unused = Shrink(0);
  }
  Unmap(unused);
}

PagePool::Stats PagePool::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

int64_t PagePool::Limit() const { return std::max(most_, most_before_) - stats_.used_nbytes; }

void PagePool::Age(Nanos now) {
  const Nanos age = now - period_start_;
  if (age < kPeriod) return;
  most_before_ = age < 2 * kPeriod ? most_ : stats_.used_nbytes;
  most_ = stats_.used_nbytes;
  period_start_ = now;
}

std::vector<PagePool::Pages> PagePool::Shrink(int64_t limit) {
  std::vector<Pages> unused;
  while (stats_.idle_nbytes > limit) {
    const auto oldest =
        std::min_element(idle_.begin(), idle_.end(), [](const auto& a, const auto& b) {
          return a.second.front().given < b.second.front().given;
        });
    unused.push_back({oldest->second.front().data, oldest->first});
    stats_.idle_nbytes -= oldest->first;
    oldest->second.pop_front();
    if (oldest->second.empty()) idle_.erase(oldest);
  }
  return unused;
}

void PagePool::Unmap(const std::vector<Pages>& pages) {
  for (const Pages& p : pages) munmap(p.data, static_cast<size_t>(p.nbytes));
}

}  // namespace gradred
