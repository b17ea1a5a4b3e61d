// Launchers, the choice of a library and what is refused, without any MPI: this program has the
// symbols of an Open MPI of its own (linked with exported symbols), whose answers the tests set.
#include <cstdlib>
#include <map>
#include <optional>

#include "base/log.h"
#include "comm/fabric.h"
#include "comm/mpi/mpi_abi.h"
#include "comm/mpi/mpi_library.h"
#include "comm/mpi/self_messages.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

struct FakeMpi {
  std::string version = "Open MPI v9.8.7, package: none";
  int abi_major = -1;
  bool initialized = false, finalized = false;
  int level = mpi::OpenMpiAbi::kThreadMultiple;
  int size = 1;
  int tag_ub = 1 << 30;
  int init_calls = 0;
};
FakeMpi fake;

}  // namespace

namespace fake_abi {
#define GRADRED_X(kind) using kind = mpi::OpenMpiAbi::kind;
GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
using Status = mpi::OpenMpiAbi::Status;

extern "C" {
char ompi_mpi_comm_null, ompi_mpi_comm_world, ompi_mpi_comm_self, ompi_mpi_byte,
    ompi_mpi_errors_return, ompi_request_null, ompi_mpi_uint8_t, ompi_mpi_uint16_t,
    ompi_mpi_uint32_t, ompi_mpi_uint64_t, ompi_mpi_int8_t, ompi_mpi_int16_t, ompi_mpi_int32_t,
    ompi_mpi_int64_t, ompi_mpi_float, ompi_mpi_double, ompi_mpi_op_sum, ompi_mpi_op_min,
    ompi_mpi_op_max, ompi_mpi_op_prod;

int Say(int value, int* where) {
  *where = value;
  return 0;
}
int PMPI_Init_thread(int*, char***, int, int*) { return 0; }
int MPI_Abi_get_version(int* major, int* minor) {
  return Say(fake.abi_major, major) + Say(0, minor);
}
int MPI_Get_library_version(char* text, int* length) {
  text[fake.version.copy(text, 255)] = '\0';
  return Say(static_cast<int>(fake.version.size()), length);
}
int MPI_Init_thread(int*, char***, int, int* level) {
  ++fake.init_calls;
  fake.initialized = true;
  return Say(fake.level, level);
}
int MPI_Query_thread(int* level) { return Say(fake.level, level); }
int MPI_Initialized(int* flag) { return Say(fake.initialized, flag); }
int MPI_Finalized(int* flag) { return Say(fake.finalized, flag); }
int MPI_Finalize() { return 0; }
int MPI_Error_class(int code, int* error_class) { return Say(code, error_class); }
int MPI_Error_string(int, char* text, int* length) { return *text = '\0', Say(0, length); }
int MPI_Comm_rank(Comm, int* rank) { return Say(0, rank); }
int MPI_Comm_size(Comm, int* size) { return Say(fake.size, size); }
int MPI_Comm_test_inter(Comm, int* flag) { return Say(0, flag); }
int MPI_Comm_get_attr(Comm, int, void* value, int* flag) {
  *static_cast<int**>(value) = &fake.tag_ub;
  return Say(1, flag);
}
int MPI_Comm_set_errhandler(Comm, Errhandler) { return 0; }
int MPI_Comm_dup(Comm comm, Comm* copy) { return *copy = comm, 0; }
int MPI_Comm_free(Comm*) { return 0; }
int MPI_Comm_group(Comm, Group* group) { return *group = nullptr, 0; }
int MPI_Comm_create_group(Comm comm, Group, int, Comm* copy) { return *copy = comm, 0; }
int MPI_Group_incl(Group group, int, const int*, Group* some) { return *some = group, 0; }
int MPI_Group_free(Group*) { return 0; }
int MPI_Isend(const void*, int, Datatype, int, int, Comm, Request*) { return 0; }
int MPI_Issend(const void*, int, Datatype, int, int, Comm, Request*) { return 0; }
int MPI_Irecv(void*, int, Datatype, int, int, Comm, Request*) { return 0; }
int MPI_Iprobe(int, int, Comm, int* flag, Status*) { return Say(0, flag); }
int MPI_Test(Request*, int* flag, Status*) { return Say(1, flag); }
int MPI_Get_count(const Status*, Datatype, int* count) { return Say(0, count); }
int MPI_Ibarrier(Comm, Request*) { return 0; }
int MPI_Iallreduce(const void*, void*, int, Datatype, Op, Comm, Request*) { return 0; }
int MPI_Allgather(const void*, int, Datatype, void*, int, Datatype, Comm) { return 0; }
int MPI_Allgatherv(const void*, int, Datatype, void*, const int*, const int*, Datatype, Comm) {
  return 0;
}
}
}  // namespace fake_abi

namespace {

const char* const kVariables[] = {"OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OPAL_PREFIX",
                                  "JSM_NAMESPACE_SIZE",
                                  "JSM_NAMESPACE_RANK",
                                  "PALS_RANKID",
                                  "PMI_SIZE",
                                  "PMI_RANK",
                                  "PMI_FD",
                                  "HYDI_CONTROL_FD",
                                  "FLUX_JOB_SIZE",
                                  "FLUX_TASK_RANK",
                                  "MV2_COMM_WORLD_SIZE",
                                  "MV2_COMM_WORLD_RANK",
                                  "SLURM_PROCID",
                                  "SLURM_STEP_ID",
                                  "SLURM_STEP_NUM_TASKS",
                                  "PMIX_RANK",
                                  "PMIX_SIZE",
                                  "HOROVOD_RANK",
                                  "HOROVOD_SIZE",
                                  "HOROVOD_GLOO_RENDEZVOUS_ADDR",
                                  "MPI4PY_LIBMPI"};

// The environment of one test, and a fresh MPI; puts everything back.
class Scene {
 public:
  explicit Scene(const std::map<std::string, std::string>& environment) {
    for (const char* name : kVariables) {
      const char* old = std::getenv(name);
      if (old) saved_[name] = old;
      unsetenv(name);
    }
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    fake = {};
  }
  ~Scene() {
    for (const char* name : kVariables) unsetenv(name);
    for (const auto& [name, value] : saved_) setenv(name.c_str(), value.c_str(), 1);
    fake = {};
  }

 private:
  std::map<std::string, std::string> saved_;
};

struct LauncherCase {
  std::map<std::string, std::string> environment;
  std::string name, family;
  int size, rank;
};

TEST(LaunchersAreFoundByTheirVariables) {
  const std::vector<LauncherCase> cases = {
      {{}, "", "", 0, -1},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}, {"PMIX_RANK", "3"}},
       "mpirun of Open MPI",
       "openmpi",
       4,
       3},
      // mpirun inside an allocation of Slurm
      {{{"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_RANK", "3"},
        {"SLURM_PROCID", "0"},
        {"SLURM_STEP_ID", "0"}},
       "mpirun of Open MPI",
       "openmpi",
       4,
       3},
      {{{"JSM_NAMESPACE_SIZE", "6"}, {"JSM_NAMESPACE_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "6"}},
       "jsrun",
       "openmpi",
       6,
       5},
      {{{"PALS_RANKID", "1"}, {"PMI_SIZE", "2"}, {"PMI_RANK", "1"}},
       "mpiexec of PALS (Cray)",
       "mpich",
       2,
       1},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", "7"}},
       "mpiexec (Hydra of MPICH or Intel MPI)",
       "mpich",
       2,
       1},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"HYDI_CONTROL_FD", "7"}},
       "mpiexec (Hydra of MPICH or Intel MPI)",
       "mpich",
       2,
       1},
      {{{"FLUX_JOB_SIZE", "8"}, {"FLUX_TASK_RANK", "7"}, {"PMI_RANK", "7"}, {"PMI_FD", "7"}},
       "flux run",
       "",
       8,
       7},
      {{{"SLURM_PROCID", "2"},
        {"SLURM_STEP_ID", "0"},
        {"SLURM_STEP_NUM_TASKS", "3"},
        {"PMIX_RANK", "2"}},
       "srun",
       "",
       3,
       2},
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}}, "", "", 0, -1},  // a batch script
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "5"}}, "a PMI launcher", "mpich", 5, 0},
      {{{"PMIX_RANK", "0"}}, "a PMIx launcher", "", 0, 0},
      {{{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "4"}, {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"}},
       "horovodrun without MPI (Gloo)",
       "gloo",
       4,
       1},
      {{{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "4"}}, "", "", 0, -1},
      // its launcher under another one of a single process
      {{{"HOROVOD_RANK", "1"},
        {"HOROVOD_SIZE", "4"},
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"},
        {"OMPI_COMM_WORLD_SIZE", "1"},
        {"OMPI_COMM_WORLD_RANK", "0"}},
       "horovodrun without MPI (Gloo)",
       "gloo",
       4,
       1},
      {{{"MV2_COMM_WORLD_SIZE", "4"}, {"MV2_COMM_WORLD_RANK", "2"}},
       "mpirun_rsh of MVAPICH",
       "mpich",
       4,
       2},
      {{{"OMPI_COMM_WORLD_SIZE", "four"}, {"OMPI_COMM_WORLD_RANK", ""}},
       "mpirun of Open MPI",
       "openmpi",
       0,
       -1},
      {{{"OMPI_COMM_WORLD_SIZE", "-4"}, {"OMPI_COMM_WORLD_RANK", "99999999999"}},
       "mpirun of Open MPI",
       "openmpi",
       0,
       -1},
  };
  for (const LauncherCase& c : cases) {
    const Scene scene(c.environment);
    const LauncherInfo info = FindLauncher();
    CHECK_EQ(info.name, c.name);
    CHECK_EQ(info.family, c.family);
    CHECK_EQ(info.size, c.size);
    CHECK_EQ(info.rank, c.rank);
  }
  const Scene scene({{"OMPI_COMM_WORLD_SIZE", "4"}, {"OPAL_PREFIX", "/opt/openmpi"}});
  CHECK_EQ(FindLauncher().prefix, "/opt/openmpi");
}

TEST(FamilyAndAbiFollowWhatTheLibrarySays) {
  using mpi::AbiKind;
  struct Case {
    std::string version;
    int abi_major;
    std::string family;
    AbiKind abi;
  };
  const std::vector<Case> cases = {
      {"Open MPI v5.0.11, package: x", -1, "openmpi", AbiKind::kOpenMpi},
      {"IBM Spectrum MPI v10.4", -1, "openmpi", AbiKind::kOpenMpi},
      {"Open MPI v6.0.0", 1, "openmpi", AbiKind::kStandard},
      {"MPICH Version:\t5.0.2\nMPICH Release date: x", -1, "mpich", AbiKind::kMpich},
      {"MPICH Version:\t5.0.2", 1, "mpich", AbiKind::kStandard},
      {"MPICH Version:\t9", 2, "mpich", AbiKind::kUnknown},
      {"Intel(R) MPI Library 2021.18 for Linux* OS", -1, "mpich", AbiKind::kMpich},
      {"Intel(R) MPI Library 2021.18 for Linux* OS", 1, "mpich",
       AbiKind::kUnknown},  // a draft of the standard
      {"MPI VERSION    : CRAY MPICH version 8.1", -1, "mpich", AbiKind::kMpich},
      {"MVAPICH Version: 4.0", -1, "mpich", AbiKind::kMpich},
      {"SomeOther MPI 1.0", -1, "", AbiKind::kUnknown},
  };
  for (const Case& c : cases) {
    const Scene scene({});
    fake.version = c.version;
    fake.abi_major = c.abi_major;
    const std::vector<mpi::Library> loaded = mpi::LoadedLibraries();
    CHECK_EQ(loaded.size(), size_t(1));
    CHECK_EQ(loaded[0].family, c.family);
    CHECK_EQ(std::string(mpi::AbiName(loaded[0].abi)), mpi::AbiName(c.abi));
    CHECK(loaded[0].global);
    if (c.abi == AbiKind::kUnknown)
      CHECK_ERROR(OpenMpiFabric({}), Kind::kUnsupported, "not known here");
  }
  const Scene scene({});
  fake.version = "MPICH Version:\t  5.0.2\nMPICH Release date: x";
  const std::string text = mpi::LoadedLibraries()[0].Describe();
  CHECK_EQ(text.substr(0, text.find(" (")), "MPICH Version 5.0.2");
}

TEST(InitialisedIsWhatTheLibrarySays) {
  const Scene scene({});
  CHECK(!MpiIsInitialized());
  fake.initialized = true;
  CHECK(MpiIsInitialized());
  fake.finalized = true;
  CHECK(!MpiIsInitialized());
}

TEST(SettingsThatNameNoMpiAreRefused) {
  const Scene scene({});
  WorldOptions options;
  options.mpi_library = "/nonexistent/libmpi.so.40";
  CHECK_ERROR(OpenMpiFabric(options), Kind::kUnsupported, "/nonexistent/libmpi.so.40");
}

TEST(AnotherFamilysLauncherIsRefusedBeforeInit) {
  for (const std::string version : {"Open MPI v9.8.7", "MPICH Version: 9"}) {
    const bool openmpi = version[0] == 'O';
    const Scene scene(openmpi ? std::map<std::string, std::string>{{"PMI_RANK", "0"},
                                                                   {"PMI_SIZE", "4"},
                                                                   {"PMI_FD", "9"}}
                              : std::map<std::string, std::string>{{"OMPI_COMM_WORLD_SIZE", "4"}});
    fake.version = version;
    CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument,
                openmpi ? "Hydra" : "mpirun of Open MPI started 4 processes");
    CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument, "GRADRED_MPI_LIBRARY");
    CHECK_EQ(fake.init_calls, 0);
  }
}

TEST(AloneUnderALauncherOfManyIsAnError) {
  const Scene scene({{"SLURM_PROCID", "2"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}});
  fake.initialized = true;
  for (const char* part :
       {"srun started 4 processes, yet each is alone in MPI (size 1, expected 4)",
        "Open MPI v9.8.7", "--mpi=pmix"})
    CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument, part);
  CHECK_EQ(fake.init_calls, 0);
}

TEST(HorovodrunWithoutMpiIsToldTheOption) {
  const Scene scene(
      {{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "4"}, {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"}});
  CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument, "add --mpi to the horovodrun command");
  CHECK_EQ(fake.init_calls, 0);
  fake.initialized = true;
  CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument, "each is alone in MPI");
}

TEST(FinalisedMpiIsRefused) {
  const Scene scene({});
  fake.initialized = fake.finalized = true;
  CHECK_ERROR(OpenMpiFabric({}), Kind::kInvalidArgument, "was finalised");
}

TEST(ThreadLevelsBelowSerializedAreRefused) {
  for (const int level : {mpi::OpenMpiAbi::kThreadSingle, mpi::OpenMpiAbi::kThreadFunneled}) {
    const Scene scene({});
    fake.initialized = true;
    fake.level = level;
    CHECK_ERROR(OpenMpiFabric({}), Kind::kUnsupported,
                level == 0 ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED");
    CHECK_ERROR(OpenMpiFabric({}), Kind::kUnsupported, "mpi4py.rc.thread_level");
  }
}

TEST(TagsAndCommunicatorsAreChecked) {
  const Scene scene({});
  fake.initialized = true;
  fake.tag_ub = 32767;
  CHECK_ERROR(OpenMpiFabric({}), Kind::kUnsupported, "32767");
  fake.tag_ub = 1 << 30;
  WorldOptions options;
  int handle = 0;
  options.mpi_comm = &handle;
  options.mpi_comm_size = sizeof handle;
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument,
              "has 4 bytes, expected 8 (Open MPI ABI)");
  void* null = &fake_abi::ompi_mpi_comm_null;
  options.mpi_comm = &null;
  options.mpi_comm_size = sizeof null;
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument, "MPI_COMM_NULL");
  fake.initialized = false;
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument, "not initialised");
  fake.initialized = true;
  options = {};
  options.ranks = {0, 1};
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument, "ranks [0, 1]: 1 ");
  options.ranks = {0, 0};
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument, "ranks [0, 0]: 0 comes twice");
  fake.size = 3;
  options.ranks = {2, 1};
  CHECK_ERROR(OpenMpiFabric(options), Kind::kInvalidArgument,
              "rank 0 of MPI_COMM_WORLD is not in ranks [2, 1]");
}

TEST(ASerializedMpiIsUsedWithOneWarning) {
  const Scene scene({});
  static int warnings = 0;
  SetLogSink([](LogLevel level, const std::string& line) {
    warnings +=
        level == LogLevel::kWarning && line.find("MPI_THREAD_SERIALIZED") != std::string::npos;
  });
  fake.initialized = true;
  fake.level = mpi::OpenMpiAbi::kThreadSerialized;
  for (int i = 0; i < 2; ++i) {
    const auto fabric = OpenMpiFabric({});
    CHECK(fabric->Describe().find("one call at a time") != std::string::npos);
    fabric->Close();
  }
  SetLogSink({});
  CHECK_EQ(warnings, 1);
}

TEST(MessagesToOneselfMatchByTagAndOrder) {
  mpi::SelfMessages messages;
  int a = 1, b = 2, c = 3, x = 0, y = 0, z = 0;
  const auto receive = messages.Receive(7, &x, sizeof x);
  messages.Send(8, &c, sizeof c);
  CHECK(!receive->finished);
  messages.Send(7, &a, sizeof a);
  messages.Send(7, &b, sizeof b);
  messages.Receive(7, &y, sizeof y);
  messages.Receive(8, &z, sizeof z);
  CHECK(receive->finished && x == 1 && y == 2 && z == 3);
  const auto send = messages.Send(7, &a, 3);
  const auto wrong = messages.Receive(7, &x, 4);
  CHECK(send->finished && send->status.ok() && wrong->finished);
  CHECK_EQ(wrong->status.message(),
           "message of this rank to itself, tag 7: expected 4 bytes, got 3 bytes");
}

}  // namespace

int main(int argc, char** argv) { return testing::Main(argc, argv); }
