// What the MPI fabric promises, run on every rank of a job: mpirun -n 3 mpi_ranks [--mode=...]
// [name of a test].
//   --mode=plain (default), ranks (a subset in another order), adopt-multiple, adopt-serialized,
//   adopt-funneled (MPI initialised by the program), abort, fork,
//   reopen;  --library=PATH;  --prefix=PATH
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>

#include "base/log.h"
#include "comm/algorithm_communicator.h"
#include "comm/fabric.h"
#include "comm/mpi/mpi_transport.h"
#include "conformance.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

constexpr Nanos kDeadline = 60 * kSecond;

std::unique_ptr<Fabric> fabric;
WorldOptions options;

int Rank() { return fabric->bootstrap().rank(); }
int Size() { return fabric->bootstrap().size(); }

void Finish(Work& work, Transport& transport, const char* what) {
  ThrowIfError(Wait(work, transport, kDeadline, what));
}

// Bytes that name their sender, message and place.
std::vector<uint8_t> Bytes(int rank, int message, int64_t nbytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(nbytes));
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>(31 * rank + 7 * message + i % 251);
  return bytes;
}

Message AwaitPosted(Transport& transport) {
  Message message;
  for (const Nanos start = Now(); !transport.TakePosted(&message);) {
    CHECK(Now() - start < kDeadline);
    std::this_thread::yield();
  }
  return message;
}

void Barrier() { fabric->bootstrap().AllGather(""); }

// Every rank to the next one, `count` messages of one tag at once.
void Ring(Transport& transport, Tag tag, int count, int64_t nbytes) {
  const int rank = transport.rank(), size = transport.size();
  const int next = (rank + 1) % size, last = (rank + size - 1) % size;
  std::vector<std::vector<uint8_t>> in, out;
  std::vector<WorkPtr> works;
  for (int i = 0; i < count; ++i) {
    in.push_back(Bytes(99, 99, nbytes + i));
    out.push_back(Bytes(rank, i, nbytes + i));
  }
  for (int i = 0; i < count; ++i)
    works.push_back(transport.Recv(last, tag, in[size_t(i)].data(), nbytes + i));
  for (int i = 0; i < count; ++i)
    works.push_back(transport.Send(next, tag, out[size_t(i)].data(), nbytes + i));
  for (WorkPtr& work : works) Finish(*work, transport, "ring");
  for (int i = 0; i < count; ++i) CHECK(in[size_t(i)] == Bytes(last, i, nbytes + i));
}

// Calls f(transport) on a transport with small chunks, of the ABI in use. Its communicator stays:
// chunks that the test leaves unmatched make freeing it an error.
template <class Abi, class F>
void WithChunkOf(const mpi::Library& library, int64_t chunk, F f) {
  auto calls = std::make_shared<mpi::Mpi<Abi>>(library);
  auto comm = calls->api.comm_null;
  calls->Call("MPI_Comm_dup", calls->api.Comm_dup, calls->api.comm_world, &comm);
  calls->Call("MPI_Comm_set_errhandler", calls->api.Comm_set_errhandler, comm,
              calls->api.errors_return);
  int rank = -1, size = 0;
  calls->Call("MPI_Comm_rank", calls->api.Comm_rank, comm, &rank);
  calls->Call("MPI_Comm_size", calls->api.Comm_size, comm, &size);
  mpi::MpiTransport<Abi> transport(
      calls, comm, std::make_shared<mpi::Datagrams<Abi>>(calls, comm, rank), rank, size, chunk);
  f(transport);
  Barrier();
}
// Calls f with the traits of a library's ABI.
template <class F>
void WithAbi(const mpi::Library& library, F f) {
  if (library.abi == mpi::AbiKind::kOpenMpi) f(mpi::OpenMpiAbi());
  if (library.abi == mpi::AbiKind::kMpich) f(mpi::MpichAbi());
  if (library.abi == mpi::AbiKind::kStandard) f(mpi::StandardAbi());
}
template <class F>
void WithChunk(int64_t chunk, F f) {
  const mpi::Library library = mpi::ChooseLibrary(options, FindLauncher());
  WithAbi(library, [&](auto abi) { WithChunkOf<decltype(abi)>(library, chunk, f); });
}

TEST(BootstrapGathersBlobsOfAnySize) {
  for (const int unit : {0, 1, 1000}) {
    const auto all =
        fabric->bootstrap().AllGather(std::string(size_t(unit * Rank()), char('a' + Rank())));
    CHECK_EQ(all.size(), size_t(Size()));
    for (int r = 0; r < Size(); ++r)
      CHECK_EQ(all[size_t(r)], std::string(size_t(unit * r), char('a' + r)));
  }
}

TEST(MessagesOfOneTagKeepTheirOrder) {
  const auto transport = fabric->MakeTransport(Traffic::kData);
  for (const int64_t nbytes : {0, 1, 1000, 100'001, 3'000'000}) Ring(*transport, {3, 5}, 4, nbytes);
  Ring(*transport, {kChannels - 1, kSequences - 1}, 2, 10);
}

TEST(ChunksMakeOneMessage) {
  WithChunk(1000, [](Transport& transport) {
    for (const int64_t nbytes : {0, 1, 999, 1000, 1001, 2000, 5500})
      Ring(transport, {0, 1}, 3, nbytes);
  });
}

// A message of `sent` bytes where `posted` are expected, from every rank to the next one.
void Mismatch(Transport& transport, uint16_t sequence, int64_t sent, int64_t posted) {
  const int rank = transport.rank(), size = transport.size(), last = (rank + size - 1) % size;
  const auto out = Bytes(rank, 0, sent);
  std::vector<uint8_t> in(static_cast<size_t>(posted));
  WorkPtr receive = transport.Recv(last, {2, sequence}, in.data(), posted);
  WorkPtr send = transport.Send((rank + 1) % size, {2, sequence}, out.data(), sent);
  const Status status = Wait(*receive, transport, kDeadline, "receive");
  CHECK_EQ(std::string(KindName(status.kind())), "TransportError");
  const auto says = [&](const std::string& text) {
    testing::Check(status.message().find(text) != std::string::npos,
                   status.message() + " / " + text, __FILE__, __LINE__);
  };
  says("tag " + std::to_string(2 * kSequences + sequence));
  says("expected " + std::to_string(posted) + " bytes, got ");
  if (size > 1)
    says("rank " + std::to_string(rank) + ": MPI message from rank " + std::to_string(last));
  if (sent < posted && sent < 1000) says("got " + std::to_string(sent) + " bytes");
  Finish(*send, transport, "send");
}

TEST(WrongSizesAreErrors) {
  WithChunk(1000, [](Transport& transport) {
    uint16_t sequence = 0;
    const std::vector<std::array<int64_t, 2>> cases = {
        {10, 11},     {11, 10},     {0, 1},       {1, 0},       {1000, 999},
        {999, 1000},  {2000, 1000}, {1000, 2000}, {2000, 2500}, {2500, 2000},
        {2000, 1999}, {5000, 10},   {10, 5000}};
    for (const auto& [sent, posted] : cases) Mismatch(transport, sequence++, sent, posted);
  });
}

TEST(MessagesToOneself) {
  const auto transport = fabric->MakeTransport(Traffic::kData);
  for (const bool receive_first : {true, false}) {
    for (const int64_t nbytes : {0, 1, 100'001}) {
      const auto a = Bytes(Rank(), 1, nbytes), b = Bytes(Rank(), 2, nbytes);
      std::vector<uint8_t> x(a.size()), y(a.size());
      std::vector<WorkPtr> works;
      const auto receive = [&] {
        works.push_back(transport->Recv(Rank(), {1, 1}, x.data(), nbytes));
        works.push_back(transport->Recv(Rank(), {1, 1}, y.data(), nbytes));
      };
      if (receive_first) receive();
      works.push_back(transport->Send(Rank(), {1, 1}, a.data(), nbytes));
      works.push_back(transport->Send(Rank(), {1, 1}, b.data(), nbytes));
      if (!receive_first) receive();
      for (WorkPtr& work : works) Finish(*work, *transport, "self");
      CHECK(x == a && y == b);
    }
  }
  char in[2], out[3] = {};
  const auto send = transport->Send(Rank(), {1, 2}, out, 3);
  const auto receive = transport->Recv(Rank(), {1, 2}, in, 2);
  CHECK_ERROR(Finish(*receive, *transport, "self"), Kind::kTransportError,
              "expected 2 bytes, got 3");
}

TEST(DatagramsFromEveryoneInOrder) {
  const auto transport = fabric->MakeTransport(Traffic::kSide);
  const std::vector<size_t> lengths = {0, 1, 100, size_t(kMaxDatagram)};
  for (int peer = 0; peer < Size(); ++peer)
    for (const size_t length : lengths)
      transport->Post(peer, std::string(length, char('a' + Rank())));
  std::vector<size_t> next(static_cast<size_t>(Size()), 0);
  for (size_t i = 0; i < lengths.size() * next.size(); ++i) {
    const Message message = AwaitPosted(*transport);
    const auto source = static_cast<size_t>(message.source);
    CHECK(next[source] < lengths.size());
    CHECK_EQ(message.bytes, std::string(lengths[next[source]++], char('a' + message.source)));
  }
  for (const Nanos start = Now(); transport->MustPoll() && Now() - start < kDeadline;)
    transport->Progress();
  CHECK(!transport->MustPoll());
  Barrier();
  Message none;
  CHECK(!transport->TakePosted(&none));
  CHECK_ERROR(transport->Post(0, std::string(kMaxDatagram + 1, 'x')), Kind::kInvalidArgument,
              "4097");
  CHECK_ERROR(transport->Post(Size(), "x"), Kind::kInvalidArgument, std::to_string(Size()));
}

TEST(DatagramsNobodyTakesDoNotDelayTheEnd) {
  const auto transport = fabric->MakeTransport(Traffic::kSide);
  for (int i = 0; i < 20; ++i) transport->Post((Rank() + 1) % Size(), std::string(4000, 'x'));
}

TEST(TrafficIsApart) {
  const auto control = fabric->MakeTransport(Traffic::kControl);
  const auto data = fabric->MakeTransport(Traffic::kData);
  const int next = (Rank() + 1) % Size(), last = (Rank() + Size() - 1) % Size();
  const Tag tag{1, 1};
  const char c = 'c', d = 'd';
  char from_control = 0, from_data = 0;
  std::vector<WorkPtr> works;
  works.push_back(data->Send(next, tag, &d, 1));
  works.push_back(control->Send(next, tag, &c, 1));
  works.push_back(control->Recv(last, tag, &from_control, 1));
  works.push_back(data->Recv(last, tag, &from_data, 1));
  for (WorkPtr& work : works) Finish(*work, *data, "traffic");
  CHECK_EQ(from_control, 'c');
  CHECK_EQ(from_data, 'd');
  CHECK_ERROR(control->Post(next, "x"), Kind::kInternal, "without them");
}

TEST(MustPollWhileSomethingIsUnfinished) {
  if (Size() == 1) return;
  const auto transport = fabric->MakeTransport(Traffic::kData);
  CHECK(!transport->MustPoll());
  const int next = (Rank() + 1) % Size(), last = (Rank() + Size() - 1) % Size();
  char in = 0, out = 'x';
  WorkPtr receive = transport->Recv(last, {0, 0}, &in, 1);
  CHECK(!receive->Poll());
  CHECK(transport->MustPoll());
  Barrier();
  WorkPtr send = transport->Send(next, {0, 0}, &out, 1);
  Finish(*send, *transport, "send");
  Finish(*receive, *transport, "receive");
  CHECK(!transport->MustPoll());
}

TEST(ThreadsUseTransportsOfTheirOwn) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (const Traffic traffic : {Traffic::kControl, Traffic::kData, Traffic::kSide})
    transports.push_back(fabric->MakeTransport(traffic));
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (auto& transport : transports)
    threads.emplace_back([&good, &transport] {
      try {
        for (uint16_t i = 0; i < 50; ++i) Ring(*transport, {i, 1}, 2, 20'000 * (i % 3));
        ++good;
      } catch (const std::exception& e) {
        std::printf("rank %d: %s\n", transport->rank(), e.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(good.load(), 3);
}

conformance::ConformanceOptions Named(const std::string& name) {
  conformance::ConformanceOptions conform;
  conform.name = name;
  conform.timeout = kDeadline;
  conform.abort = false;  // --mode=abort
  return conform;
}

TEST(TransportConforms) {
  const auto transport = fabric->MakeTransport(Traffic::kSide);
  conformance::CheckTransport(*transport, Named("MPI transport"));
  WithChunk(1000, [](Transport& chunked) {
    conformance::CheckTransport(chunked, Named("MPI transport in chunks"));
  });
}

TEST(CommunicatorConforms) {
  const auto transport = fabric->MakeTransport(Traffic::kData);
  std::vector<int> members(static_cast<size_t>(Size()));
  std::iota(members.begin(), members.end(), 0);
  conformance::CheckCommunicator(*MakeAlgorithmCommunicator(*transport, members, 1),
                                 Named("algorithms over MPI"));
  std::reverse(members.begin(), members.end());
  conformance::CheckCommunicator(*MakeAlgorithmCommunicator(*transport, members, 2),
                                 Named("reversed ranks over MPI"));
  if (Size() > 2 && Rank() != 1) {
    members.erase(std::find(members.begin(), members.end(), 1));
    conformance::CheckCommunicator(*MakeAlgorithmCommunicator(*transport, members, 3),
                                   Named("some ranks over MPI"));
  }
  Barrier();
}

TEST(NativeReductionsConform) {
  const auto transport = fabric->MakeTransport(Traffic::kData);
  std::vector<int> members(static_cast<size_t>(Size()));
  std::iota(members.begin(), members.end(), 0);
  AlgorithmOptions native;
  native.rows = {{"allreduce", 0, Algorithm::kNative, ""}};
  native.native = transport->MakeNative(members);
  auto conform = Named("MPI_Iallreduce");
  conform.ordered = conform.averages = false;
  conform.plain = true;
  conformance::CheckCommunicator(*MakeAlgorithmCommunicator(*transport, members, 4, native),
                                 conform);
  CHECK(!transport->MustPoll());
  Barrier();
}

TEST(WrongArgumentsAreErrors) {
  const auto transport = fabric->MakeTransport(Traffic::kData);
  char byte = 0;
  CHECK_ERROR(transport->Send(-1, {0, 0}, &byte, 1), Kind::kInvalidArgument, "peer -1");
  CHECK_ERROR(transport->Recv(Size(), {0, 0}, &byte, 1), Kind::kInvalidArgument, "none of the");
  CHECK_ERROR(transport->Recv(0, {0, kSequences}, &byte, 1), Kind::kInvalidArgument,
              "sequence 128");
  CHECK_ERROR(transport->Recv(0, {0, 0}, &byte, -1), Kind::kInvalidArgument, "-1 bytes");
}

// --- Modes
// ------------------------------------------------------------------------------------------------------------------

// Does what a program does that initialises MPI itself.
template <class Abi>
void Adopt(const mpi::Library& library, int level) {
  static mpi::Mpi<Abi> calls(library);
  static typename Abi::Comm comm = calls.api.comm_world;
  int got = 0;
  calls.Call("MPI_Init_thread", calls.api.Init_thread, nullptr, nullptr, level, &got);
  CHECK_EQ(got, level);
  options.mpi_comm = &comm;
  options.mpi_comm_size = sizeof comm;
  std::atexit([] { calls.api.Finalize(); });
}

void AdoptAt(const std::string& level) {
  const mpi::Library library = mpi::ChooseLibrary(options, FindLauncher());
  WithAbi(library, [&](auto abi) {
    using Abi = decltype(abi);
    Adopt<Abi>(library, level == "multiple"     ? Abi::kThreadMultiple
                        : level == "serialized" ? Abi::kThreadSerialized
                                                : Abi::kThreadFunneled);
  });
}

// Runs after the exit handlers that are registered later: MPI must be as the abort left it. Then
// finalises it, without the project's code, so that the MPI library removes its files.
void FinalizeBehindTheAbort() {
  for (const mpi::Library& library : mpi::LoadedLibraries()) {
    if (!library.initialized || library.finalized) continue;
    WithAbi(library, [&](auto abi) { mpi::Api<decltype(abi)>(library).Finalize(); });
    std::printf("left alone at exit\n");
  }
}

// Leaves a receive and a datagram behind, and returns at once.
int AbortMode() {
  const auto transport = fabric->MakeTransport(Traffic::kSide);
  const int last = (Rank() + Size() - 1) % Size();
  static char in[1 << 20];
  const WorkPtr receive = transport->Recv(last, {0, 0}, in, sizeof in);
  transport->Post(last, "nobody takes this");
  CHECK(!receive->Poll());
  Barrier();
  const uint32_t ticket = transport->bell().Ticket();
  std::thread([&] {
    transport->Abort({Kind::kPeerLost, "rank 7 was lost"});
    transport->Abort({Kind::kInternal, "a later cause"});
  }).join();
  CHECK(transport->bell().Sleep(ticket, kDeadline));
  CHECK(receive->Poll());
  CHECK_EQ(receive->status().ToString(), "PeerLost: rank 7 was lost");
  const WorkPtr send = transport->Send(last, {0, 1}, in, 1);
  CHECK(send->Poll());
  CHECK_EQ(send->status().ToString(), "PeerLost: rank 7 was lost");
  transport->Post(last, "x");
  Message message;
  CHECK(!transport->TakePosted(&message));
  transport->Progress();
  auto conform = Named("MPI transport, aborted");
  conform.abort = true;
  conformance::CheckTransport(*fabric->MakeTransport(Traffic::kSide), conform);
  Barrier();
  fabric->Abort();
  fabric->Close();
  CHECK_ERROR(OpenMpiFabric(options), Kind::kNotInitialized, "engine error");
  std::printf("rank %d: aborted well\n", Rank());
  return 0;
}

void ForkMode() {
  auto transport = fabric->MakeTransport(Traffic::kSide);
  transport->Post((Rank() + 1) % Size(), "a datagram under way");
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    const WorkPtr send = transport->Send((Rank() + 1) % Size(), {0, 0}, &byte, 1);
    const bool refused =
        Size() == 1 || (send->Poll() && send->status().kind() == Kind::kNotInitialized);
    transport.reset();
    fabric->Close();
    fabric.reset();
    std::exit(refused ? 0 : 1);  // with exit handlers
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Ring(*transport, {0, 0}, 3, 1000);
}

void ReopenMode() {
  for (int i = 0; i < 3; ++i) {
    fabric->Close();
    fabric.reset();
    fabric = OpenMpiFabric(options);
    const auto transport = fabric->MakeTransport(Traffic::kData);
    Ring(*transport, {0, 0}, 3, 1000);
  }
}

int Run(const std::string& mode, int argc, char** argv) {
  if (mode.rfind("adopt-", 0) == 0) AdoptAt(mode.substr(6));
  if (mode == "abort") std::atexit(FinalizeBehindTheAbort);
  if (mode == "ranks") {
    const int size = FindLauncher().size;
    for (int rank = size - 1; rank > 0; --rank) options.ranks.push_back(rank);
    if (FindLauncher().rank == 0) {
      CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument,
                  "rank 0 of MPI_COMM_WORLD is not in ranks [");
      std::printf("refused well\n");
      return 0;
    }
  }
  if (mode == "adopt-funneled") {
    CHECK_ERROR(OpenMpiFabric(options), Kind::kUnsupported,
                "was initialised with MPI_THREAD_FUNNELED");
    CHECK_ERROR(OpenMpiFabric(options), Kind::kUnsupported, "mpi4py.rc.thread_level");
    std::printf("refused well\n");
    return 0;
  }
  fabric = OpenMpiFabric(options);
  CHECK(MpiIsInitialized());
  if (mode == "ranks") CHECK_EQ(Rank(), FindLauncher().size - 1 - FindLauncher().rank);
  if (Rank() == 0) std::printf("%d ranks: %s\n", Size(), fabric->Describe().c_str());
  if (mode == "abort") return AbortMode();
  if (mode == "fork") ForkMode();
  if (mode == "reopen") ReopenMode();
  // The other tests use MPI_COMM_WORLD.
  static char program[] = "mpi_ranks", only[] = "MessagesOfOneTagKeepTheirOrder";
  static char* some[] = {program, only};
  const int code = mode == "ranks" ? testing::Main(2, some) : testing::Main(argc, argv);
  fabric->Close();
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  SetLogSink([](LogLevel, const std::string& line) { std::printf("log: %s\n", line.c_str()); });
  std::string mode = "plain";
  std::vector<char*> rest = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i], value = argument.substr(argument.find('=') + 1);
    if (argument.rfind("--mode=", 0) == 0)
      mode = value;
    else if (argument.rfind("--library=", 0) == 0)
      options.mpi_library = value;
    else if (argument.rfind("--prefix=", 0) == 0)
      options.prefix = value;
    else
      rest.push_back(argv[i]);
  }
  try {
    return Run(mode, static_cast<int>(rest.size()), rest.data());
  } catch (const std::exception& e) {
    std::printf("FAILED %s: %s\n", mode.c_str(), e.what());
    return 1;
  }
}
