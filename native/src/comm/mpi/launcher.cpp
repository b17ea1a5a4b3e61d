// Who started this process, read from the variables that launchers set and from the process's
// ancestors.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "comm/fabric.h"

namespace gradred::comm {
namespace {

struct Row {
  const char* name;
  const char* family;
  std::vector<const char*> all_of;  // variables that must be set
  const char* size;
  const char* rank;
};

// The first row that fits counts. SLURM_* alone says nothing of the MPI; horovodrun without --mpi
// starts no MPI at all, whatever it was started by.
const std::vector<Row>& Rows() {
  static const auto* rows = new std::vector<Row>{
      {"horovodrun without MPI (Gloo)",
       "gloo",
       {"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"},
       "HOROVOD_SIZE",
       "HOROVOD_RANK"},
      {"jsrun", "openmpi", {"JSM_NAMESPACE_SIZE"}, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"},
      {"mpirun of Open MPI",
       "openmpi",
       {"OMPI_COMM_WORLD_SIZE"},
       "OMPI_COMM_WORLD_SIZE",
       "OMPI_COMM_WORLD_RANK"},
      {"mpiexec of PALS (Cray)", "mpich", {"PALS_RANKID"}, "PMI_SIZE", "PALS_RANKID"},
      {"flux run", "", {"FLUX_JOB_SIZE", "FLUX_TASK_RANK"}, "FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
      {"mpiexec (Hydra of MPICH or Intel MPI)",
       "mpich",
       {"PMI_RANK", "PMI_FD"},
       "PMI_SIZE",
       "PMI_RANK"},
      {"mpiexec (Hydra of MPICH or Intel MPI)",
       "mpich",
       {"PMI_RANK", "HYDI_CONTROL_FD"},
       "PMI_SIZE",
       "PMI_RANK"},
      {"srun", "", {"SLURM_PROCID", "SLURM_STEP_ID"}, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
      {"mpirun_rsh of MVAPICH",
       "mpich",
       {"MV2_COMM_WORLD_RANK"},
       "MV2_COMM_WORLD_SIZE",
       "MV2_COMM_WORLD_RANK"},
      {"a PMI launcher", "mpich", {"PMI_RANK"}, "PMI_SIZE", "PMI_RANK"},
      {"a PMIx launcher", "", {"PMIX_RANK"}, "PMIX_SIZE", "PMIX_RANK"},
  };
  return *rows;
}

int NumberOr(const char* variable, int none) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return none;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return *end == '\0' && value >= 0 && value <= INT32_MAX ? static_cast<int>(value) : none;
}

std::string ParentFolder(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string ExecutableOf(long pid) {
  std::string path(4096, '\0');
  const ssize_t n =
      readlink(("/proc/" + std::to_string(pid) + "/exe").c_str(), path.data(), path.size());
  path.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return path;
}

long ParentOf(long pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string stat((std::istreambuf_iterator<char>(file)), {});
  // "pid (command) state parent ...", and the command may hold anything.
  const size_t end = stat.rfind(')');
  return end == std::string::npos
             ? 0
             : std::strtol(stat.c_str() + std::min(end + 4, stat.size()), nullptr, 10);
}

// The installation of the launcher: its executable is a parent of this process, perhaps with shells
// between.
std::string PrefixOfAncestor() {
  long pid = getppid();
  for (int generation = 0; pid > 1 && generation < 8; ++generation, pid = ParentOf(pid)) {
    const std::string path = ExecutableOf(pid), folder = ParentFolder(path);
    for (const char* known : {"/prte", "/orte", "/hydra_", "/mpiexec", "/mpirun"})
      if (path.compare(folder.size(), std::string(known).size(), known) == 0)
        return ParentFolder(folder);
  }
  return "";
}

}  // namespace

LauncherInfo FindLauncher() {
  for (const Row& row : Rows()) {
    bool fits = true;
    for (const char* variable : row.all_of) fits = fits && std::getenv(variable);
    if (!fits) continue;
    LauncherInfo info{row.name, row.family, NumberOr(row.size, 0), NumberOr(row.rank, -1), ""};
    // mpirun of Open MPI sets it where needed, and any Open MPI looks for its parts there.
    const char* opal = std::getenv("OPAL_PREFIX");
    info.prefix = opal && info.family == "openmpi" ? opal : PrefixOfAncestor();
    return info;
  }
  return {};
}

}  // namespace gradred::comm
