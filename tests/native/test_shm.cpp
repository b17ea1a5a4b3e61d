// Transport and communicator of shared memory: in threads that share one mapping, and in processes.
#include <sched.h>
#include <sys/resource.h>

#include <numeric>
#include <thread>

#include "base/log.h"
#include "comm/shm/communicator.h"
#include "comm/shm/page.h"
#include "comm/shm/transport.h"
#include "conformance.h"
#include "processes.h"
#include "ranks.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

constexpr uint64_t kNonce = 0x5eed;
constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};

conformance::ConformanceOptions Named(const std::string& name) {
  conformance::ConformanceOptions options;
  options.name = name;
  return options;
}

std::vector<int> AllOf(int size) {
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::shared_ptr<shm::Page> MakePage(int size, int64_t ring_nbytes) {
  shm::PageOptions options;
  options.ring_nbytes = ring_nbytes;
  return shm::Page::Create(size, kNonce, shm::Naming::kAnonymous, options);
}

// body(rank, page) in processes that attach the page.
void InProcesses(int size, int64_t ring_nbytes,
                 const std::function<void(int, std::shared_ptr<shm::Page>)>& body) {
  const auto page = MakePage(size, ring_nbytes);
  testing::RunProcesses(size, [&](int rank) { body(rank, shm::Page::Attach(page->key())); });
}

void CheckShmCommunicator(Transport& transport, const shm::ShmOptions& shm_options,
                          const std::string& name) {
  auto options = Named(name);
  options.node_of.assign(static_cast<size_t>(transport.size()), 0);
  const auto communicator =
      shm::MakeCommunicator(transport, AllOf(transport.size()), 4, shm_options);
  conformance::CheckCommunicator(*communicator, options);
}

LayoutPtr FloatLayout(int64_t count) {
  return std::make_shared<reduce::Layout>(
      std::vector<reduce::Section>{{0, count, DType::kFloat32, reduce::ReduceOp::kSum}});
}

void Await(Work& work, Transport& transport) {
  ThrowIfError(Wait(work, transport, 60 * kSecond, "a test's work"));
}

}  // namespace

TEST(TransportConformsInThreads) {
  for (const int size : kSizes) {
    for (const int64_t ring : {64, 4096, 65536}) {
      const auto page = MakePage(size, ring);
      auto options = Named("shared memory in threads, rings of " + std::to_string(ring));
      if (ring == 64) options.long_nbytes = 20'001;  // thousands of hand-overs each
      testing::RunRanks(size, [&](int rank) {
        const auto transport = shm::MakeTransport(page, 0, rank);
        conformance::CheckTransport(*transport, options);
      });
    }
  }
}

TEST(TransportConformsInProcesses) {
  for (const int size : kSizes) {
    for (const int64_t ring : {64, 65536}) {
      auto options = Named("shared memory, rings of " + std::to_string(ring));
      if (ring == 64) options.long_nbytes = 20'001;  // thousands of hand-overs each
      InProcesses(size, ring, [&](int rank, std::shared_ptr<shm::Page> page) {
        for (int number = 0; number < shm::kTransports; ++number) {
          const auto transport = shm::MakeTransport(page, number, rank);
          CHECK(!transport->MustPoll());
          conformance::CheckTransport(*transport, options);
        }
      });
    }
  }
}

TEST(CommunicatorConformsInThreads) {
  for (const int size : kSizes) {
    const auto page = MakePage(size, 4096);
    testing::RunRanks(size, [&](int rank) {
      const auto transport = shm::MakeTransport(page, 1, rank);
      shm::ShmOptions options;
      options.nonce = kNonce;
      CheckShmCommunicator(*transport, options, "shared memory in threads");
    });
  }
}

TEST(CommunicatorConformsInProcesses) {
  for (const int size : kSizes) {
    InProcesses(size, 65536, [&](int rank, std::shared_ptr<shm::Page> page) {
      const auto transport = shm::MakeTransport(page, 1, rank);
      shm::ShmOptions options;
      options.nonce = kNonce;
      CheckShmCommunicator(*transport, options, "shared memory");
    });
  }
}

// Blocks of one line and a Poll of one block, rings that hold a few words, segments with names,
// scale of a larger node.
TEST(CommunicatorConformsInSmallSteps) {
  for (const int size : {1, 2, 3, 5}) {
    InProcesses(size, 64, [&](int rank, std::shared_ptr<shm::Page> page) {
      const auto transport = shm::MakeTransport(page, 1, rank);
      shm::ShmOptions options;
      options.nonce = kNonce;
      options.naming = shm::Naming::kNamed;
      options.scale_size = size + 1;
      options.block_nbytes = 64;
      options.poll_nbytes = 1;
      CheckShmCommunicator(*transport, options, "shared memory in small steps");
    });
  }
}

// Without polling in between: a receiver must be woken by an arrival, and a sender by freed space.
TEST(SleepersAreWoken) {
  InProcesses(2, 1024, [&](int rank, std::shared_ptr<shm::Page> page) {
    const auto transport = shm::MakeTransport(page, 0, rank);
    std::vector<char> bytes(100'000, rank == 0 ? 'a' : 'b');
    const auto sleep_until_done = [&](Work& work) {
      while (true) {
        const uint32_t ticket = transport->bell().Ticket();
        if (work.Poll()) break;
        const Nanos start = Now();
        transport->bell().Sleep(ticket, 60 * kSecond);  // which may return early
        CHECK(Now() - start < 30 * kSecond);
      }
      ThrowIfError(work.status());
    };
    for (int round = 0; round < 200; ++round) {
      const int sender = round % 2;
      const auto work = rank == sender ? transport->Send(1 - rank, {1, 1}, bytes.data(), 100'000)
                                       : transport->Recv(1 - rank, {1, 1}, bytes.data(), 100'000);
      sleep_until_done(*work);
      // The first message's letter goes to and fro.
      CHECK(bytes == std::vector<char>(bytes.size(), 'a'));
    }
  });
}

// Segments grow while the peers are elsewhere, and the old one's pages go back at once.
TEST(SegmentsGrowWithoutTheOthers) {
  InProcesses(3, 4096, [&](int rank, std::shared_ptr<shm::Page> page) {
    const auto transport = shm::MakeTransport(page, 1, rank);
    shm::ShmOptions options;
    options.nonce = kNonce;
    const auto communicator = shm::MakeCommunicator(*transport, AllOf(3), 0, options);
    SegmentPtr segment;
    for (int64_t count = 16; count < 3'000'000; count *= 4) {
      const auto layout = FloatLayout(count);
      segment = communicator->Alloc(layout->nbytes());
      auto* values = static_cast<float*>(segment->data());
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(rank + i % 100);
      const WorkPtr work = communicator->AllReduce(*segment, 0, layout);
      Await(*work, *transport);
      for (int64_t i = 0; i < count; ++i)
        CHECK_EQ(values[i], static_cast<float>(3 + 3 * (i % 100)));
    }
  });
}

// One rank has no descriptor for memory of its own, or, with one more, none to open a peer's.
TEST(MemoryThatOneRankCannotHaveIsNobodys) {
  constexpr int kFree[] = {0, 1, 2};  // descriptors
  InProcesses(3, 4096, [&](int rank, std::shared_ptr<shm::Page> page) {
    const auto transport = shm::MakeTransport(page, 1, rank);
    shm::ShmOptions options;
    options.nonce = kNonce;
    const auto communicator = shm::MakeCommunicator(*transport, AllOf(3), 0, options);
    Await(*communicator->Barrier(), *transport);
    std::vector<std::string> warnings;
    SetLogSink([&](LogLevel, const std::string& line) { warnings.push_back(line); });
    for (const int free : kFree) {
      rlimit before{};
      getrlimit(RLIMIT_NOFILE, &before);
      if (rank == 1) {
        std::vector<int> lowest;
        for (int i = 0; i <= free; ++i) lowest.push_back(dup(0));
        const rlimit limit{static_cast<rlim_t>(lowest.back()), before.rlim_max};
        for (const int descriptor : lowest) close(descriptor);
        setrlimit(RLIMIT_NOFILE, &limit);
      }
      SegmentPtr segment;
      const WorkPtr work = communicator->AllocOnAll(200'000, &segment);
      Await(*work, *transport);
      setrlimit(RLIMIT_NOFILE, &before);
      CHECK_EQ(segment != nullptr, free == 2);
      CHECK_EQ(warnings.size(), rank == 1 && free < 2 ? 1U : 0U);
      for (const std::string& line : warnings) {
        CHECK(line.find("rank 1: ") == 0);
        CHECK(line.find("Too many open files") != std::string::npos);
      }
      warnings.clear();
      if (segment == nullptr) continue;
      auto* values = static_cast<float*>(segment->data());
      std::fill_n(values, 25'000, static_cast<float>(rank));
      Await(*communicator->AllReduce(*segment, 0, FloatLayout(25'000)), *transport);
      CHECK_EQ(values[24'999], 3.0F);
    }
    SetLogSink({});
  });
}

// More than there are tags: a tag's next Work waits for the one before.
TEST(MoreWorksThanSequences) {
  InProcesses(3, 4096, [&](int rank, std::shared_ptr<shm::Page> page) {
    constexpr int kWorks = 2 * kSequences + 10;
    const auto transport = shm::MakeTransport(page, 1, rank);
    const auto communicator = shm::MakeCommunicator(*transport, AllOf(3), 0, {});
    const auto layout = FloatLayout(3);
    const auto segment = communicator->Alloc(kWorks * layout->nbytes());
    std::vector<WorkPtr> works;
    const auto value = [&](int k) {
      return reinterpret_cast<float*>(static_cast<char*>(segment->data()) + k * layout->nbytes());
    };
    for (int k = 0; k < kWorks; ++k) {
      std::fill_n(value(k), 3, static_cast<float>(k + rank));
      works.push_back(communicator->AllReduce(*segment, k * layout->nbytes(), layout));
    }
    for (const WorkPtr& work : works) Await(*work, *transport);
    for (int k = 0; k < kWorks; ++k) CHECK_EQ(value(k)[2], static_cast<float>(3 * k + 3));
  });
}

TEST(DifferentCollectivesAreAnError) {
  InProcesses(2, 4096, [&](int rank, std::shared_ptr<shm::Page> page) {
    const auto transport = shm::MakeTransport(page, 1, rank);
    const auto communicator = shm::MakeCommunicator(*transport, AllOf(2), 0, {});
    const auto layout = FloatLayout(100);
    const auto segment = communicator->Alloc(4096);
    const WorkPtr work = communicator->AllReduce(*segment, rank * 64, layout);
    const Status status = Wait(*work, *transport, 60 * kSecond, "a mismatch");
    CHECK_EQ(std::string(KindName(status.kind())), "Internal");
    CHECK(status.message().find("offset " + std::to_string(64 - rank * 64)) != std::string::npos);
  });
}

TEST(WrongSegmentsAreRefused) {
  const auto page = shm::Page::Private(kNonce);
  const auto transport = shm::MakeTransport(page, 1, 0);
  const auto communicator = shm::MakeCommunicator(*transport, {0}, 0, {});
  const auto segment = communicator->Alloc(128);
  CHECK_ERROR(communicator->AllReduce(*segment, 0, FloatLayout(100)), Kind::kInvalidArgument,
              "within 128 bytes");
  CHECK_ERROR(communicator->AllReduce(*segment, 1, FloatLayout(1)), Kind::kInvalidArgument,
              "at offset 1");
  CHECK_ERROR(transport->Send(1, {}, nullptr, 0), Kind::kInvalidArgument, "rank 1");
  CHECK_ERROR(transport->Post(0, std::string(5000, 'x')), Kind::kInvalidArgument, "5000 bytes");
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
