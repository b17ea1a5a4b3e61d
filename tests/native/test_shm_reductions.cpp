// Reductions in shared memory beyond the conformance suite: random programs, chunks, flags, faults.
#include <signal.h>

#include <cmath>
#include <numeric>
#include <random>
#include <thread>

#include "checked_cargo.h"
#include "comm/shm/communicator.h"
#include "comm/shm/page.h"
#include "comm/shm/transport.h"
#include "conformance_data.h"
#include "processes.h"

using namespace gradred;
using namespace gradred::comm;
using conformance::Bytes;
using testing::CheckedCargo;

namespace {

constexpr uint64_t kNonce = 0x5eed2;
const Status kCause(Kind::kPeerLost, "rank 1 of the test is lost");

struct Rank {
  Rank(int rank, int size, const shm::MemoryKey& page, shm::ShmOptions options = {})
      : transport(shm::MakeTransport(shm::Page::Attach(page), 1, rank)) {
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    options.nonce = kNonce;
    communicator = shm::MakeCommunicator(*transport, all, 0, options);
  }
  void Await(Work& work) { ThrowIfError(Wait(work, *transport, 60 * kSecond, "a test's work")); }

  std::unique_ptr<Transport> transport;
  std::unique_ptr<Communicator> communicator;
};

// body(rank) in processes.
void InProcesses(int size, const shm::ShmOptions& options,
                 const std::function<void(Rank&, int)>& body) {
  const auto page = shm::Page::Create(size, kNonce, shm::Naming::kAnonymous);
  testing::RunProcesses(size, [&](int number) {
    Rank rank(number, size, page->key(), options);
    body(rank, number);
  });
}

LayoutPtr Floats(int64_t count) {
  return std::make_shared<reduce::Layout>(
      std::vector<reduce::Section>{{0, count, DType::kFloat32, reduce::ReduceOp::kSum}});
}

void CheckSame(const reduce::Layout& layout, const char* got, const Bytes& expected,
               const std::string& what) {
  const std::string difference =
      conformance::Difference(layout, got, expected.data(), {0, layout.nbytes()});
  testing::Check(difference.empty(), what + ": " + difference, __FILE__, __LINE__);
}

int HalvingsOf(Communicator& communicator) {
  return static_cast<int>(
      std::lround(std::log2(communicator.size() * communicator.average_residual())));
}

// A work on its way, with what it must give.
struct Started {
  LayoutPtr layout;
  std::shared_ptr<CheckedCargo> cargo;  // null: in a segment
  SegmentPtr segment;
  int64_t offset = 0;
  Bytes expected;
  WorkPtr work;
};

Started Start(Communicator& communicator, std::mt19937_64& agreed) {
  Started s;
  const uint64_t seed = agreed();
  const uint64_t most = agreed() % 4 == 0 ? 700 : 60;
  s.layout = conformance::MixedLayout(static_cast<int64_t>(agreed() % most), seed, true);
  const int halvings = HalvingsOf(communicator);
  Bytes input = conformance::Inputs(*s.layout, seed, communicator.rank(), halvings);
  s.expected = conformance::Reduced(*s.layout, seed, communicator.size(), halvings);
  if (agreed() % 4 != 0) {
    s.cargo = std::make_shared<CheckedCargo>(std::move(input));
    s.work = communicator.AllReduceCargo(s.layout, s.cargo);
    return s;
  }
  s.offset = static_cast<int64_t>(agreed() % 9) * reduce::kAlign;
  s.segment = communicator.Alloc(s.offset + s.layout->nbytes() + reduce::kAlign);
  std::copy(input.begin(), input.end(), static_cast<char*>(s.segment->data()) + s.offset);
  s.work = communicator.AllReduce(*s.segment, s.offset, s.layout);
  return s;
}

}  // namespace

// Sizes, offsets, chunks, windows, limits and numbers of works under way at random, against a
// scalar reference.
TEST(RandomPrograms) {
  for (const int size : {2, 3, 5}) {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      std::mt19937_64 options_random(seed);
      shm::ShmOptions options;
      options.chunk_nbytes = 64 << options_random() % 9;
      options.window_chunks = 1 + static_cast<int>(options_random() % 6);
      options.small_nbytes = static_cast<int64_t>(options_random() % 3) * 2000;
      options.poll_nbytes = 1 << options_random() % 20;
      options.scale_size = size + static_cast<int>(options_random() % 3);
      InProcesses(size, options, [&](Rank& rank, int number) {
        std::mt19937_64 agreed(seed * 77), own(seed * 1000 + static_cast<uint64_t>(number));
        std::vector<Started> under_way;
        for (int i = 0; i < 60; ++i) {
          under_way.push_back(Start(*rank.communicator, agreed));
          // Polls of an order of this rank's own.
          for (size_t k = own() % 3; k > 0; --k) under_way[own() % under_way.size()].work->Poll();
          if (agreed() % 3 != 0 && under_way.size() < 20) continue;
          for (Started& s : under_way) {
            rank.Await(*s.work);
            const std::string what = "seed " + std::to_string(seed) + ", work " + std::to_string(i);
            CHECK(s.cargo == nullptr || s.cargo->whole());
            CheckSame(*s.layout,
                      s.cargo != nullptr ? s.cargo->output.data()
                                         : static_cast<char*>(s.segment->data()) + s.offset,
                      s.expected, what);
          }
          under_way.clear();
        }
        for (Started& s : under_way) rank.Await(*s.work);
      });
    }
  }
}

// Chunks change nothing, not the last bit: averages and sums of every floating dtype.
TEST(ChunksGiveTheBitsOfSegments) {
  for (const int size : {2, 3, 5}) {
    for (const int64_t chunk : {64, 192, 4096, 100'000}) {
      for (const int64_t small : {0, 4096}) {
        shm::ShmOptions options;
        options.chunk_nbytes = chunk;
        options.small_nbytes = small;
        InProcesses(size, options, [&](Rank& rank, int number) {
          for (const int64_t count : {1, 33, 2001}) {
            const auto layout = conformance::FloatingLayout(count, 5, true);
            const Bytes input = conformance::RoundedInputs(*layout, 9, number);
            const auto cargo = std::make_shared<CheckedCargo>(input);
            const WorkPtr streamed = rank.communicator->AllReduceCargo(layout, cargo);
            const auto segment = rank.communicator->Alloc(layout->nbytes());
            std::copy(input.begin(), input.end(), static_cast<char*>(segment->data()));
            const WorkPtr in_place = rank.communicator->AllReduce(*segment, 0, layout);
            rank.Await(*in_place);
            rank.Await(*streamed);
            const char* data = static_cast<const char*>(segment->data());
            CheckSame(*layout, cargo->output.data(), Bytes(data, data + layout->nbytes()),
                      "chunks of " + std::to_string(chunk));
          }
        });
      }
    }
  }
}

// Without polling in between: the last rank to pass a flag wakes the others, and a Poll that stops
// for others' sake leaves its own bell rung.
TEST(SleepersAreWokenByFlags) {
  shm::ShmOptions options;
  options.chunk_nbytes = 4096;
  options.window_chunks = 2;
  options.poll_nbytes = 3000;
  InProcesses(3, options, [](Rank& rank, int number) {
    const auto sleep_until_done = [&](Work& work) {
      while (true) {
        const uint32_t ticket = rank.transport->bell().Ticket();
        if (work.Poll()) break;
        CHECK(rank.transport->bell().Sleep(ticket, 60 * kSecond));
      }
      ThrowIfError(work.status());
    };
    for (int round = 0; round < 150; ++round) {
      const int64_t count = round % 3 == 0 ? 4 : 7000;
      const auto layout = Floats(count);
      if (round % 3 == 1) {
        const auto segment = rank.communicator->Alloc(layout->nbytes());
        std::fill_n(static_cast<float*>(segment->data()), count, static_cast<float>(number));
        sleep_until_done(*rank.communicator->AllReduce(*segment, 0, layout));
        CHECK_EQ(static_cast<float*>(segment->data())[count - 1], 3.0F);
        continue;
      }
      Bytes input(static_cast<size_t>(layout->nbytes()));
      std::fill_n(reinterpret_cast<float*>(input.data()), count, static_cast<float>(number));
      const auto cargo = std::make_shared<CheckedCargo>(std::move(input));
      sleep_until_done(*rank.communicator->AllReduceCargo(layout, cargo));
      CHECK_EQ(reinterpret_cast<const float*>(cargo->output.data())[count - 1], 3.0F);
    }
  });
}

TEST(WindowsAreSmallForSmallGroups) {
  shm::ShmOptions options;
  InProcesses(2, options, [&](Rank& rank, int) {
    const auto reduce = [&](int64_t count) {
      const auto layout = Floats(count);
      const auto cargo =
          std::make_shared<CheckedCargo>(Bytes(static_cast<size_t>(layout->nbytes())));
      rank.Await(*rank.communicator->AllReduceCargo(layout, cargo));
    };
    CHECK_EQ(rank.communicator->window_nbytes(), 0);
    reduce(4);
    CHECK(rank.communicator->window_nbytes() < 100'000);
    reduce(5000);
    CHECK(rank.communicator->window_nbytes() < 300'000);
    reduce(3'000'000);
    const int64_t window = options.window_chunks * options.chunk_nbytes;
    CHECK(rank.communicator->window_nbytes() >= window);
    CHECK(rank.communicator->window_nbytes() < window + 100'000);
  });
}

// A small work finishes on the rank that comes last before the others have looked: what that rank
// brings to later works must not lie where they look.
TEST(ARankMayLookLate) {
  constexpr int kLater = 40;
  const auto page = shm::Page::Create(2, kNonce, shm::Naming::kAnonymous);
  Rank early(0, 2, page->key()), late(1, 2, page->key());
  const LayoutPtr small = Floats(16), large = Floats(8192);
  struct Side {
    std::vector<SegmentPtr> segments;
    std::vector<WorkPtr> works;
    void Start(Rank& rank, const LayoutPtr& layout) {
      segments.push_back(rank.communicator->Alloc(layout->nbytes()));
      static_cast<float*>(segments.back()->data())[0] = 1;
      works.push_back(rank.communicator->AllReduce(*segments.back(), 0, layout));
    }
  } a, b;
  const auto finish = [&] {
    const Nanos end = Now() + 30 * kSecond;
    for (bool all = false; !all; CHECK(Now() < end)) {
      all = true;
      for (Side* side : {&a, &b})
        for (const WorkPtr& work : side->works) all &= work->Poll();
    }
    for (Side* side : {&a, &b})
      for (size_t i = 0; i < side->works.size(); ++i) {
        CHECK(side->works[i]->status().ok());
        CHECK_EQ(static_cast<float*>(side->segments[i]->data())[0], 2.0f);
      }
  };
  b.Start(late, small);
  a.Start(early, small);
  finish();  // the board is open
  b.Start(late, small);
  a.Start(early, small);
  CHECK(a.works.back()->Poll());
  for (int i = 0; i < kLater; ++i) a.Start(early, large);
  CHECK(b.works.back()->Poll());
  CHECK(b.works.back()->status().ok());
  for (int i = 0; i < kLater; ++i) b.Start(late, large);
  finish();
}

TEST(DifferentWorksAreAnError) {
  for (const int64_t count : {10, 100'000}) {  // on the board and through a window
    InProcesses(2, {}, [&](Rank& rank, int number) {
      const auto layout = Floats(count + 16 * number);
      const auto cargo =
          std::make_shared<CheckedCargo>(Bytes(static_cast<size_t>(layout->nbytes())));
      const WorkPtr work = rank.communicator->AllReduceCargo(layout, cargo);
      const Status status = Wait(*work, *rank.transport, 60 * kSecond, "a mismatch");
      CHECK_EQ(std::string(KindName(status.kind())), "Internal");
      CHECK(status.message().find("issue collectives in different orders") != std::string::npos);
      CHECK(status.message().find("rank " + std::to_string(1 - number) + " came with") !=
            std::string::npos);
    });
  }
}

// A rank that never comes: whoever waits for its flag ends with the cause of the abort.
TEST(AnAbortEndsWaitingForFlags) {
  for (const int64_t count : {4, 5000, 1'000'000}) {
    for (const bool in_place : {false, true}) {
      InProcesses(2, {}, [&](Rank& rank, int number) {
        const auto layout = Floats(count);
        const auto first = rank.communicator->Barrier();
        rank.Await(*first);
        if (number == 1) return;
        SegmentPtr segment;
        WorkPtr work;
        if (in_place) {
          segment = rank.communicator->Alloc(layout->nbytes());
          work = rank.communicator->AllReduce(*segment, 0, layout);
        } else {
          const Bytes input(static_cast<size_t>(layout->nbytes()));
          work = rank.communicator->AllReduceCargo(layout, std::make_shared<CheckedCargo>(input));
        }
        CHECK(!work->Poll());
        std::thread other([&] { rank.transport->Abort(kCause); });
        const Status status = Wait(*work, *rank.transport, 60 * kSecond, "an abort");
        other.join();
        CHECK_EQ(status.message(), kCause.message());
        const auto next = rank.communicator->AllReduceCargo(
            layout, std::make_shared<CheckedCargo>(Bytes(static_cast<size_t>(layout->nbytes()))));
        CHECK(next->Poll());
        CHECK_EQ(next->status().message(), kCause.message());
      });
    }
  }
}

// Killed in the middle of a stream: the survivor ends by the abort of whoever notices.
TEST(AKilledPeerStopsNobody) {
  const auto page = shm::Page::Create(2, kNonce, shm::Naming::kAnonymous);
  const auto ends = testing::RunAndCollect(2, [&](int number) {
    Rank rank(number, 2, page->key());
    const auto layout = Floats(4'000'000);
    const auto cargo = std::make_shared<CheckedCargo>(Bytes(static_cast<size_t>(layout->nbytes())));
    const WorkPtr work = rank.communicator->AllReduceCargo(layout, cargo);
    if (number == 1) {
      while (cargo->unpacked == 0) CHECK(!work->Poll());
      raise(SIGKILL);
    }
    const Status late = Wait(*work, *rank.transport, kSecond, "a stream with a dead peer");
    CHECK_EQ(std::string(KindName(late.kind())), "Timeout");
    rank.transport->Abort(kCause);
    CHECK(work->Poll());
    CHECK_EQ(work->status().message(), kCause.message());
  });
  CHECK(WIFSIGNALED(ends[1].status));
  testing::Check(ends[0].ok(), ends[0].output, __FILE__, __LINE__);
}

// What a fork of Python's multiprocessing does: the child's copies must not touch the parent's.
TEST(AForkedChildDamagesNoFlags) {
  const auto page = shm::Page::Create(1, kNonce, shm::Naming::kAnonymous);
  auto rank = std::make_unique<Rank>(0, 1, page->key());
  const auto reduce = [&] {
    const auto layout = Floats(50'000);
    Bytes input(static_cast<size_t>(layout->nbytes()), 'a');
    const auto cargo = std::make_shared<CheckedCargo>(input);
    rank->Await(*rank->communicator->AllReduceCargo(layout, cargo));
    CHECK(cargo->output == input);
  };
  reduce();
  testing::RunProcesses(1, [&](int) { rank.reset(); });
  reduce();
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
