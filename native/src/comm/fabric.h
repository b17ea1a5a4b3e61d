// What joins the machines of a job: a way to meet, and transports over all ranks. comm/mpi opens
// one on MPI; comm/local one for a single machine, whose transports are null (shared memory serves
// all ranks there). comm/world.cpp puts shared memory on top.
#pragma once

#include <memory>
#include <string>

#include "comm/bootstrap.h"
#include "comm/job_notes.h"
#include "comm/transport.h"
#include "comm/world.h"

namespace gradred::comm {

enum class Traffic { kControl, kData, kSide, kDiff };
// Whether datagrams are posted among it: where they are not, nobody looks for any.
inline bool HasDatagrams(Traffic traffic) {
  return traffic == Traffic::kSide || traffic == Traffic::kDiff;
}

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual Bootstrap& bootstrap() = 0;
  // Collective. Over all ranks of the job, with traffic apart from the others'; null where the
  // fabric has no messages of its own. Post is for transports that HasDatagrams.
  virtual std::unique_ptr<Transport> MakeTransport(Traffic traffic) = 0;
  virtual std::string Describe() const = 0;
  // See World.
  virtual std::string MakeMpiCommunicator(const std::vector<int>& /*members*/) { return {}; }
  // Collective; frees what the fabric made (MPI_Finalize if it initialised MPI). Transports are
  // destroyed before.
  virtual void Close() = 0;
  // After an engine error: no call reaches the outside library again, at exit neither.
  virtual void Abort() = 0;
};

std::unique_ptr<Fabric> OpenMpiFabric(const WorldOptions& options);  // comm/mpi/
std::unique_ptr<Fabric> OpenLocalFabric(const WorldOptions& options,
                                        const OpeningCheck& check);  // comm/local/
// A call of MPI does not return: from now on nothing of MPI is called in this process.
void LeaveMpi();  // comm/mpi/
// What a launcher's variables say of this process; size 0: not launched.
struct LauncherInfo {
  std::string name;    // "mpirun of Open MPI"; empty: none
  std::string family;  // "openmpi", "mpich", "" (any)
  int size = 0, rank = -1;
  std::string prefix;  // installation that the launcher belongs to
};
LauncherInfo FindLauncher();  // comm/mpi/
bool MpiIsInitialized();      // comm/mpi/: some MPI library of this process is initialised
int InitializedMpiSize();     // comm/mpi/: of its MPI_COMM_WORLD; 0: none is initialised
int LocalLauncherSize();      // comm/local/: ranks that were started without MPI; 0: not said

}  // namespace gradred::comm
