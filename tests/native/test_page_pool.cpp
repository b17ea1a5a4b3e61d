// The pool of touched pages. Sizes of a pool of the process: the tests run one after the other.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/page_pool.h"
#include "testing.h"

using namespace gradred;

namespace {

constexpr int64_t kMb = 1 << 20;

// A pool that holds nothing and remembers nothing.
PagePool& Fresh() {
  PagePool& pool = PagePool::The();
  pool.Release();
  return pool;
}

}  // namespace

TEST(ABufferIsUsedAgain) {
  PagePool& pool = Fresh();
  const auto before = pool.stats();
  void* a = pool.Take(3 * kMb);
  CHECK_EQ(reinterpret_cast<uintptr_t>(a) % (2 * kMb), 0u);
  std::memset(a, 1, 3 * kMb);
  pool.Give(a, 3 * kMb);
  CHECK_EQ(pool.stats().idle_nbytes, 3 * kMb);
  void* b = pool.Take(3 * kMb - 5);  // of the same class
  CHECK(a == b);
  CHECK_EQ(pool.stats().reused - before.reused, 1);
  CHECK_EQ(pool.stats().fresh - before.fresh, 1);
  CHECK_EQ(static_cast<char*>(b)[3 * kMb - 1], 1);
  pool.Give(b, 3 * kMb - 5);
  CHECK_EQ(pool.stats().used_nbytes, before.used_nbytes);
}

TEST(SmallOnesComeFromMalloc) {
  PagePool& pool = Fresh();
  const auto before = pool.stats();
  for (int64_t nbytes :
       {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{1000}, PagePool::kLeast - 1}) {
    void* data = pool.Take(nbytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
    std::memset(data, 1, nbytes);
    pool.Give(data, nbytes);
  }
  CHECK_EQ(pool.stats().fresh, before.fresh);
  CHECK_EQ(pool.stats().idle_nbytes, 0);
}

TEST(NoMoreIsKeptThanWasInUseAtOnce) {
  PagePool& pool = Fresh();
  // Other sizes one after the other: the old ones make room.
  for (int64_t mb : {8, 7, 6, 5, 4, 3, 2, 1}) {
    void* data = pool.Take(mb * kMb);
    pool.Give(data, mb * kMb);
    CHECK(pool.stats().idle_nbytes <= 8 * kMb);
  }
  CHECK(pool.stats().idle_nbytes > 0);
  // Two periods later nothing of it is left.
  pool.Trim(Now() + 15 * kSecond);
  pool.Trim(Now() + 30 * kSecond);
  CHECK_EQ(pool.stats().idle_nbytes, 0);
}

TEST(MemoryThatIsNotToBeHad) {
  PagePool& pool = Fresh();
  const auto before = pool.stats();
  CHECK(pool.Take(int64_t{1} << 60) == nullptr);
  CHECK_EQ(pool.stats().used_nbytes, before.used_nbytes);
  // It was never in use, so no more is kept for it.
  for (int64_t mb : {8, 7, 6, 5, 4, 3, 2, 1}) {
    pool.Give(pool.Take(mb * kMb), mb * kMb);
    CHECK(pool.stats().idle_nbytes <= 8 * kMb);
  }
}

TEST(NoBufferHasTwoOwners) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  PagePool& pool = Fresh();
  std::atomic<bool> wrong{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(seed + t);
      struct Held {
        int64_t* data;
        int64_t nbytes, mark;
      };
      std::vector<Held> held;
      for (int i = 0; i < 2000; ++i) {
        if (held.size() < 8 && random() % 2) {
          const int64_t nbytes = PagePool::kLeast + random() % (4 * PagePool::kLeast);
          auto* data = static_cast<int64_t*>(pool.Take(nbytes));
          const int64_t mark = t * 1000000 + i;
          data[0] = data[nbytes / 8 - 1] = mark;
          held.push_back({data, nbytes, mark});
        } else if (!held.empty()) {
          const size_t k = random() % held.size();
          const Held one = held[k];
          held.erase(held.begin() + static_cast<int64_t>(k));
          if (one.data[0] != one.mark || one.data[one.nbytes / 8 - 1] != one.mark) wrong = true;
          pool.Give(one.data, one.nbytes);
        }
      }
      for (const Held& one : held) pool.Give(one.data, one.nbytes);
    });
  for (auto& thread : threads) thread.join();
  CHECK(!wrong);
  CHECK_EQ(pool.stats().used_nbytes, 0);
}

TEST(AForkedChildMayUseIt) {
  PagePool& pool = Fresh();
  void* mine = pool.Take(kMb);
  std::memset(mine, 7, kMb);
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // holds the mutex at the moment of some of the forks
    while (!stop) pool.Give(pool.Take(kMb), kMb);
  });
  bool good = true;
  for (int i = 0; i < 20 && good; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      void* other = pool.Take(2 * kMb);
      pool.Give(other, 2 * kMb);
      const bool same = static_cast<char*>(mine)[kMb - 1] == 7;
      pool.Give(mine, kMb);
      _exit(same ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  stop = true;
  busy.join();
  pool.Give(mine, kMb);
  CHECK(good);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
