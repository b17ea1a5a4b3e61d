// Worlds of one machine without MPI: processes that meet at a socket, with virtual nodes, faults
// and forks.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "comm/job_notes.h"
#include "comm/local/meeting.h"
#include "comm/peers.h"
#include "comm/routed.h"
#include "comm/shm/open_page.h"
#include "comm/world.h"
#include "conformance.h"
#include "processes.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

std::string NewJob() {
  static int count = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

void SetRank(const std::string& job, int rank, int size) {
  setenv("GRADRED_JOB", job.c_str(), 1);
  setenv("GRADRED_LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("GRADRED_LOCAL_SIZE", std::to_string(size).c_str(), 1);
}

WorldOptions Options(int virtual_nodes = 1) {
  WorldOptions options;
  options.transport = "local";
  options.virtual_nodes = virtual_nodes;
  options.chunk_nbytes = 4096;
  options.timeout = 60 * kSecond;
  return options;
}

// body(world) in `size` processes of one job.
std::vector<testing::ProcessEnd> CollectWorlds(int size, const WorldOptions& options,
                                               const std::function<void(World&)>& body) {
  const std::string job = NewJob();
  return testing::RunAndCollect(size, [&](int rank) {
    SetRank(job, rank, size);
    const auto world = OpenWorld(options);
    body(*world);
  });
}

void RunWorlds(int size, const WorldOptions& options, const std::function<void(World&)>& body) {
  const auto ends = CollectWorlds(size, options, body);
  std::string text;
  for (const auto& end : ends) text += end.ok() ? "" : "\n  " + end.output;
  if (!text.empty()) throw testing::Failure(std::to_string(size) + " ranks:" + text);
}

std::vector<int> AllOf(const World& world) {
  std::vector<int> all(static_cast<size_t>(world.topology().size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void Barrier(World& world) {
  const auto everybody = world.MakeControl(AllOf(world), 0);
  const WorkPtr work = everybody->Barrier();
  ThrowIfError(Wait(*work, world.control(), 60 * kSecond, "a barrier of the test"));
}

// Until a peer is found lost.
Status AwaitLoss(World& world) {
  const Nanos start = Now();
  while (Now() - start < 60 * kSecond) {
    if (const auto lost = world.CheckPeers()) return lost->status;
    const uint32_t ticket = world.side().bell().Ticket();
    world.side().bell().Sleep(ticket, 10 * kMillisecond);
  }
  throw testing::Failure("no loss was reported");
}

void CheckHas(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    throw testing::Failure("expected '" + part + "' in '" + text + "'");
  }
}

int OpenFiles() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace

TEST(WorldsConform) {
  struct Case {
    int size, virtual_nodes;
    const char* intra;
  };
  for (const Case& c :
       {Case{1, 1, "shm"}, Case{2, 1, "shm"}, Case{3, 1, "flat"}, Case{4, 2, "shm"},
        Case{5, 2, "shm"}, Case{4, 4, "shm"}, Case{4, 2, "flat"}, Case{6, 3, "shm"}}) {
    WorldOptions options = Options(c.virtual_nodes);
    options.intra = c.intra;
    RunWorlds(c.size, options, [&](World& world) {
      CHECK_EQ(world.topology().size, c.size);
      CHECK_EQ(world.topology().nodes(), c.virtual_nodes);
      conformance::ConformanceOptions conform;
      conform.name = "world of " + std::to_string(c.size) + " ranks on " +
                     std::to_string(c.virtual_nodes) + " virtual nodes, " + c.intra;
      if (std::string(c.intra) == "shm") conform.node_of = world.topology().node_of;
      conform.abort = false;
      conformance::CheckTransport(world.control(), conform);
      conformance::CheckTransport(world.side(), conform);
      {
        const auto control = world.MakeControl(AllOf(world), 0);
        const auto data = world.MakeData(AllOf(world), 0);
        auto flat = conform;
        flat.node_of.clear();
        conformance::CheckCommunicator(*control, flat);
        conformance::CheckCommunicator(*data, conform);
      }
      world.Close();
      CHECK(!world.CheckPeers());
    });
  }
}

// Sets whose members lie unevenly on the nodes, some of them with ranks in common.
TEST(ProcessSetsConform) {
  RunWorlds(5, Options(2), [](World& world) {
    const std::vector<std::vector<int>> sets = {{0, 1, 2, 3, 4}, {0, 3}, {1, 2, 4}, {4}, {0, 1}};
    for (size_t id = 0; id < sets.size(); ++id) {
      const auto& members = sets[id];
      const int rank = world.topology().rank;
      if (std::find(members.begin(), members.end(), rank) == members.end()) continue;
      conformance::ConformanceOptions conform;
      conform.name = "process set " + std::to_string(id);
      conform.node_of = world.topology().Restrict(members).node_of;
      const auto data = world.MakeData(members, static_cast<int>(id));
      conformance::CheckCommunicator(*data, conform);
    }
    CHECK_ERROR(world.MakeControl({world.topology().rank}, 4095), Kind::kInvalidArgument,
                "process sets are possible");
    world.Close();
  });
}

TEST(AWorldOfOneNeedsNothing) {
  for (const char* transport : {"self", "auto"}) {
    testing::RunProcesses(1, [&](int) {
      WorldOptions options;
      options.transport = transport;
      const auto world = OpenWorld(options);
      CHECK_EQ(world->topology().size, 1);
      Barrier(*world);
      CHECK(!world->CheckPeers());
      world->Close();
    });
  }
}

// A wait looks after the peers ten times a second; what ends at such a moment has ended well.
TEST(WorkThatEndsWhileAWaitLooksAfterPeersIsGood) {
  class Late final : public Work {
    bool Advance() override {
      if (late_) return true;
      late_ = Now() - first_ >= 100 * kMillisecond;
      return false;
    }
    const Nanos first_ = Now();
    bool late_ = false;
  };
  testing::RunProcesses(1, [&](int) {
    WorldOptions options;
    options.transport = "self";
    const auto world = OpenWorld(options);
    Late work;
    world->Wait(work, 60 * kSecond, "late work");
    world->Close();
  });
}

// The same ranks may open a world after closing one; nothing stays open.
TEST(WorldsOpenAgain) {
  const std::string job = NewJob();
  testing::RunProcesses(3, [&](int rank) {
    SetRank(job, rank, 3);
    const int files = OpenFiles();
    for (int round = 0; round < 10; ++round) {
      const auto world = OpenWorld(Options());
      if (round % 2 == 0) Barrier(*world);
      world->Close();
    }
    CHECK_EQ(OpenFiles(), files);
  });
}

TEST(AKilledPeerIsNamed) {
  const auto ends = CollectWorlds(3, Options(), [](World& world) {
    Barrier(world);
    if (world.topology().rank == 1) raise(SIGKILL);
    const Status lost = AwaitLoss(world);
    CHECK_EQ(std::string(KindName(lost.kind())), "PeerLost");
    CheckHas(lost.message(), "rank 1 on ");
    CheckHas(lost.message(), "(pid ");
    CheckHas(lost.message(), "ended without closing the job");
    world.Abort(lost);
  });
  CHECK(WIFSIGNALED(ends[1].status));
  for (const int rank : {0, 2}) CHECK_EQ(ends[static_cast<size_t>(rank)].output, "");
}

TEST(TheLaunchersNoteIsQuoted) {
  char folder[] = "/tmp/gradred-test-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  setenv("GRADRED_JOB_DIR", folder, 1);
  const std::string note = std::string(folder) + "/rank-1";
  const auto ends = CollectWorlds(2, Options(), [&](World& world) {
    Barrier(world);
    if (world.topology().rank == 1) raise(SIGKILL);
    // Not there yet at first: the launcher may learn of it after us.
    auto lost = world.CheckPeers();
    CHECK(!lost);
    std::ofstream(note) << "signal 9 (SIGKILL)\n";
    CheckHas(AwaitLoss(world).message(), "without closing the job: signal 9 (SIGKILL)");
    world.Abort({});
  });
  unsetenv("GRADRED_JOB_DIR");
  unlink(note.c_str());
  rmdir(folder);
  CHECK_EQ(ends[0].output, "");
}

TEST(TheFirstNoteIsTheCause) {
  char folder[] = "/tmp/gradred-test-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const auto write = [&](int rank, time_t when) {
    const std::string path = std::string(folder) + "/rank-" + std::to_string(rank);
    std::ofstream(path) << "exit code " << rank + 1 << '\n';
    const timespec times[] = {{when, 0}, {when, 0}};
    CHECK_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  write(0, 3000);  // it ended because of rank 1
  write(1, 1000);
  write(10, 2000);
  const JobNotes notes(folder);
  CHECK(notes.Ranks() == (std::vector<int>{1, 10, 0}));
  const std::optional<Status> cause = CheckOf(notes, {2, {}, false}, 1)();
  CHECK(cause.has_value());
  CHECK_EQ(cause->message(), "rank 1 ended before the job was open: exit code 2");
  for (const int rank : {0, 1, 10})
    unlink((std::string(folder) + "/rank-" + std::to_string(rank)).c_str());
  rmdir(folder);
}

TEST(APeerThatFailsSaysWhy) {
  const auto ends = CollectWorlds(2, Options(), [&](World& world) {
    Barrier(world);
    if (world.topology().rank == 1) {
      world.Abort({Kind::kInternal, "the cause on rank 1"});
      return;
    }
    CheckHas(AwaitLoss(world).message(), ": the cause on rank 1");
    world.Abort({});
  });
  for (const auto& end : ends) CHECK_EQ(end.output, "");
}

TEST(ALossWhileClosingIsReported) {
  const auto ends = CollectWorlds(3, Options(), [](World& world) {
    Barrier(world);
    if (world.topology().rank == 2) raise(SIGKILL);
    CHECK_ERROR(world.Close(), Kind::kPeerLost, "rank 2 on ");
    world.Abort({Kind::kPeerLost, "rank 2"});
  });
  for (const int rank : {0, 1}) CHECK_EQ(ends[static_cast<size_t>(rank)].output, "");
}

// Everybody closes, some exit long before the others look.
TEST(ACleanEndIsNoLoss) {
  RunWorlds(4, Options(2), [](World& world) {
    Barrier(world);
    world.Close();
    CHECK(!world.CheckPeers());
  });
}

TEST(AbortEndsPendingWork) {
  RunWorlds(2, Options(2), [](World& world) {
    char byte;
    const WorkPtr pending = world.data().Recv(1 - world.topology().rank, {1, 1}, &byte, 1);
    const Status cause(Kind::kPeerLost, "rank 7 is lost");
    world.Abort(cause);
    CHECK(pending->Poll());
    CHECK_EQ(pending->status().message(), cause.message());
  });
}

TEST(MissingRanksAreNamed) {
  const std::string job = NewJob();
  const auto ends = testing::RunAndCollect(2, [&](int index) {
    SetRank(job, index == 0 ? 0 : 2, 5);
    WorldOptions options = Options();
    options.timeout = kSecond;
    OpenWorld(options);
  });
  for (const auto& end : ends) CheckHas(end.output, "ranks 1, 3, 4 of 5 did not come");

  const auto alone = testing::RunAndCollect(1, [&](int) {
    SetRank(job, 1, 2);
    WorldOptions options = Options();
    options.timeout = kSecond / 2;
    OpenWorld(options);
  });
  CheckHas(alone[0].output, "rank 0 of 2 did not come");
}

TEST(ARankThatDiesWhileMeetingIsNamed) {
  const std::string job = NewJob();
  const auto ends = testing::RunAndCollect(3, [&](int rank) {
    const auto bootstrap = local::Meet(job, rank, 3, Now() + 60 * kSecond);
    bootstrap->AllGather("x");
    if (rank == 1) raise(SIGKILL);
    bootstrap->AllGather("y");
  });
  for (const int rank : {0, 2}) {
    const std::string& text = ends[static_cast<size_t>(rank)].output;
    CheckHas(text, "rank 1 (pid ");
    CheckHas(text, "ended while the job was opening");
  }
  const auto without_host = testing::RunAndCollect(2, [&](int rank) {
    const auto bootstrap = local::Meet(job + "b", rank, 2, Now() + 60 * kSecond);
    if (rank == 0) raise(SIGKILL);
    bootstrap->AllGather("y");
  });
  CheckHas(without_host[1].output, "rank 0 ended while the job was opening");
}

TEST(WrongStartsAreErrors) {
  const auto sizes = testing::RunAndCollect(
      2, [job = NewJob()](int rank) { local::Meet(job, rank, 2 + rank, Now() + 10 * kSecond); });
  for (const auto& end : sizes) CheckHas(end.output, "was started for 3 ranks");
  const auto twice = testing::RunAndCollect(3, [job = NewJob()](int index) {
    local::Meet(job, index == 0 ? 0 : 1, 3, Now() + 10 * kSecond);
  });
  CheckHas(twice[0].output, "are both started as rank 1");
  const auto settings = testing::RunAndCollect(3, [job = NewJob()](int rank) {
    SetRank(job, rank, 3);
    OpenWorld(Options(rank == 1 ? 2 : 1));
  });
  for (const auto& end : settings) {
    CheckHas(end.output, "must be the same on all ranks: it is 1 on ranks 0, 2, 2 on rank 1");
  }
  testing::RunProcesses(1, [](int) {
    unsetenv("GRADRED_LOCAL_RANK");
    CHECK_ERROR(OpenWorld(Options()), Kind::kInvalidArgument, "GRADRED_LOCAL_RANK");
    SetRank("j", 3, 2);
    CHECK_ERROR(OpenWorld(Options()), Kind::kInvalidArgument,
                "GRADRED_LOCAL_RANK: expected a rank below GRADRED_LOCAL_SIZE, got 3 of 2");
    setenv("GRADRED_LOCAL_SIZE", "2x", 1);
    CHECK_ERROR(OpenWorld(Options()), Kind::kInvalidArgument, "'2x'");
    WorldOptions options = Options();
    options.transport = "carrier pigeon";
    CHECK_ERROR(OpenWorld(options), Kind::kInvalidArgument, "auto, mpi, local, self");
    options = Options(0);
    CHECK_ERROR(OpenWorld(options), Kind::kInvalidArgument, "virtual_nodes");
  });
}

// Where /proc refuses the other processes' files: all ranks fall back alike, and no name stays.
TEST(PagesFallBackToNames) {
  const uint64_t nonce = 0x7e57beef00000000 + static_cast<uint64_t>(getpid());
  testing::RunProcesses(4, [&, job = NewJob()](int rank) {
    const auto bootstrap = local::Meet(job, rank, 4, Now() + 60 * kSecond);
    const auto page = shm::OpenPage(*bootstrap, {0, 0, 1, 1}, nonce, {shm::Naming::kNamed});
    CHECK(page->naming() == shm::Naming::kNamed);
    CHECK_EQ(page->members(), 2);
    page->member(rank % 2).cause[0] = static_cast<char>('a' + rank);
    bootstrap->AllGather("");
    CHECK_EQ(page->member(1 - rank % 2).cause[0], 'a' + (rank ^ 1));
    char name[64];
    std::snprintf(name, sizeof name, "gradred-%016llx", static_cast<unsigned long long>(nonce));
    DIR* folder = opendir("/dev/shm");
    while (const dirent* entry = readdir(folder)) {
      CHECK(std::string(entry->d_name).find(name) == std::string::npos);
    }
    closedir(folder);
  });
}

TEST(AForkedChildLeavesTheWorldAlone) {
  RunWorlds(2, Options(), [](World& world) {
    Barrier(world);
    const pid_t child = fork();
    if (child == 0) {
      world.Abort({Kind::kInternal, "from a forked child"});
      world.Close();
      world.~World();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    Barrier(world);
    CHECK(!world.CheckPeers());
    world.Close();
  });
}

TEST(ProcessesAreToldApart) {
  const ProcessId me = ThisProcess();
  CHECK_EQ(me.pid, getpid());
  CHECK(IsAlive(me));
  CHECK(!IsAlive({me.pid, me.start + 1}));
  CHECK(IsAlive({me.pid, 0}));
  CHECK(!IsAlive({(1 << 22) + 1, 0}));
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
