// Reductions in shared memory against a bare loop that copies the same bytes, in one run and
// alternating:
//   benchmark_shm_stream [ranks [chunk_kb [window_chunks [small_bytes [mb ...]]]]]; 0: the default
// bare: private tensor -> own slot of the full size (memcpy), barrier, sum of my part over all
// slots pushed to all of them, barrier, slot -> tensor. stream: AllReduceCargo of a cargo that
// copies, from one tensor into another; in place: into the same; then both with packing past the
// caches. Region: bare without its last copy, as if results stayed where they were summed; since
// somebody reads them, in place and region are measured with a pass that does. Times in
// microseconds: the slowest rank's, median over the iterations. Ranks are processes, pinned if
// there are cores enough.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/clock.h"
#include "comm/shm/communicator.h"
#include "comm/shm/page.h"
#include "comm/shm/transport.h"
#include "reduce/convert.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

constexpr uint64_t kNonce = 0xbe7c;
constexpr int kMostRanks = 64;
constexpr int kWays = 7;

// What the processes share besides slots; inherited by fork.
struct Shared {
  std::atomic<int> barrier{0};
  double us[kMostRanks];
};

void* MapShared(int64_t nbytes) {
  void* at = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return at;
}

class MemcpyCargo final : public Cargo {
 public:
  MemcpyCargo(const char* in, char* out, reduce::Stores stores)
      : in_(in), out_(out), stores_(stores) {}
  void Pack(reduce::Range range, void* at) override {
    if (stores_ == reduce::Stores::kCached) {
      std::memcpy(at, in_ + range.begin, static_cast<size_t>(range.nbytes()));
    } else {
      reduce::Convert(at, DType::kFloat32, in_ + range.begin, DType::kFloat32, range.nbytes() / 4,
                      1, nullptr, stores_);
    }
  }
  void Unpack(reduce::Range range, const void* at) override {
    std::memcpy(out_ + range.begin, at, static_cast<size_t>(range.nbytes()));
  }

 private:
  const char* in_;
  char* out_;
  const reduce::Stores stores_;
};

class Rank {
 public:
  Rank(int rank, int size, Shared* shared, char* slots, int64_t most, Communicator& communicator)
      : rank_(rank),
        size_(size),
        shared_(shared),
        slots_(slots),
        most_(most),
        communicator_(communicator),
        in_(static_cast<size_t>(most), 1),
        out_(static_cast<size_t>(most), 1) {}

  void Meet() {
    const int turn = shared_->barrier.fetch_add(1) / size_;
    for (int spins = 0; shared_->barrier.load(std::memory_order_acquire) < (turn + 1) * size_;) {
      if (++spins > 1000) sched_yield();
    }
  }

  void Bare(const reduce::Layout& layout, bool unpack) {
    const auto nbytes = static_cast<size_t>(layout.nbytes());
    std::memcpy(Slot(rank_), in_.data(), nbytes);
    Meet();
    const reduce::Range mine = reduce::Split(layout.nbytes(), size_)[static_cast<size_t>(rank_)];
    constexpr int64_t kBlock = 64 << 10;
    std::vector<const void*> ins;
    for (int r = 0; r < size_; ++r) ins.push_back(Slot(r));
    for (int64_t at = mine.begin; at < mine.end; at += kBlock) {
      const reduce::Range block{at, std::min(at + kBlock, mine.end)};
      layout.ReduceNode(Slot(rank_), ins.data(), size_, block, 1.0F);
      for (int i = 1; i < size_; ++i) {
        std::memcpy(Slot((rank_ + i) % size_) + at, Slot(rank_) + at,
                    static_cast<size_t>(block.nbytes()));
      }
    }
    Meet();
    if (unpack) std::memcpy(out_.data(), Slot(rank_), nbytes);
  }

  void Stream(const LayoutPtr& layout, bool in_place, reduce::Stores stores) {
    const auto cargo =
        std::make_shared<MemcpyCargo>(in_.data(), in_place ? in_.data() : out_.data(), stores);
    const WorkPtr work = communicator_.AllReduceCargo(layout, cargo);
    ThrowIfError(Wait(*work, communicator_.transport(), 60 * kSecond, "a stream"));
  }

  void Run(int way, const LayoutPtr& layout) {
    if (way == 0) {
      Bare(*layout, true);
    } else if (way < 5) {
      Stream(layout, way % 2 == 0, way < 3 ? reduce::Stores::kCached : reduce::Stores::kStreamed);
    } else if (way == 5) {
      Stream(layout, true, reduce::Stores::kCached);
      Read(in_.data(), layout->nbytes());
    } else {
      Bare(*layout, false);
      Read(Slot(rank_), layout->nbytes());
    }
  }

  void Read(const char* at, int64_t nbytes) {
    const auto* values = reinterpret_cast<const uint64_t*>(at);
    uint64_t all = 0;
    for (int64_t i = 0; i < nbytes / 8; ++i) all |= values[i];
    read_ = all;
  }

  void Measure(int64_t nbytes) {
    const auto layout = std::make_shared<reduce::Layout>(
        std::vector<reduce::Section>{{0, nbytes / 4, DType::kFloat32, reduce::ReduceOp::kSum}});
    const int iterations = static_cast<int>(
        std::clamp<int64_t>((int64_t{384} << 20) / std::max<int64_t>(nbytes, 1), 7, 400));
    std::vector<double> us[kWays];
    for (int i = -2; i < iterations; ++i) {
      for (int way = 0; way < kWays; ++way) {
        std::fill(in_.begin(), in_.begin() + 64, 0);
        Meet();
        const Nanos start = Now();
        Run(way, layout);
        shared_->us[rank_] = static_cast<double>(Now() - start) / 1e3;
        Meet();
        if (i >= 0) us[way].push_back(*std::max_element(shared_->us, shared_->us + size_));
        Meet();
      }
    }
    if (rank_ != 0) return;
    double median[kWays];
    for (int way = 0; way < kWays; ++way) {
      std::sort(us[way].begin(), us[way].end());
      median[way] = us[way][us[way].size() / 2];
    }
    std::printf("%10lld %10.1f", static_cast<long long>(nbytes), median[0]);
    for (int way = 1; way < kWays; ++way) {
      std::printf(" %10.1f %6.2f", median[way], median[way] / median[0]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  char* Slot(int rank) { return slots_ + rank * most_; }

  const int rank_, size_;
  Shared* shared_;
  char* slots_;
  const int64_t most_;
  Communicator& communicator_;
  std::vector<char> in_, out_;
  volatile uint64_t read_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) {
    return argc > i ? std::atoi(argv[i]) : otherwise;
  };
  const int size = std::clamp(argument(1, 2), 1, kMostRanks);
  shm::ShmOptions options;
  options.nonce = kNonce;
  if (const int kb = argument(2, 0)) options.chunk_nbytes = int64_t{kb} << 10;
  if (const int chunks = argument(3, 0)) options.window_chunks = chunks;
  if (const int small = argument(4, 0)) options.small_nbytes = small;
  std::vector<int64_t> sizes;
  for (int i = 5; i < argc; ++i) {
    sizes.push_back(static_cast<int64_t>(std::atof(argv[i]) * (1 << 20)));
  }
  if (sizes.empty()) {
    for (const int64_t mb : {1, 4, 16, 64, 256}) sizes.push_back(mb << 20);
  }
  const int64_t most = reduce::AlignUp(*std::max_element(sizes.begin(), sizes.end()));
  auto* shared = new (MapShared(sizeof(Shared))) Shared;
  char* slots = static_cast<char*>(MapShared(size * most));
  const auto page = shm::Page::Create(size, kNonce, shm::Naming::kAnonymous);

  std::printf(
      "%d ranks\n    nbytes       bare     stream  ratio   in place  ratio"
      "    past the caches        in place    in place, read       region, read\n",
      size);
  std::fflush(stdout);
  for (int rank = 0; rank < size; ++rank) {
    if (fork() != 0) continue;
    const auto cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    if (size <= cores) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(static_cast<size_t>(rank), &set);
      sched_setaffinity(0, sizeof set, &set);
    }
    const auto transport = shm::MakeTransport(shm::Page::Attach(page->key()), 1, rank);
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    const auto communicator = shm::MakeCommunicator(*transport, all, 0, options);
    Rank me(rank, size, shared, slots, most, *communicator);
    for (const int64_t nbytes : sizes) me.Measure(nbytes);
    _exit(0);
  }
  int failures = 0, status = 0;
  while (wait(&status) > 0) failures += status != 0;
  return failures == 0 ? 0 : 1;
}
