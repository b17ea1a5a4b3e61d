// The fabric of a job that MPI joins, and how MPI is opened for it.
#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "base/log.h"
#include "comm/fabric.h"
#include "comm/mpi/mpi_transport.h"

namespace gradred::comm {
namespace mpi {
namespace {

constexpr Nanos kLastDatagrams =
    kSecond;  // how long closing waits for datagrams that nobody has taken

// "; start it with ..., or ...": what to do when the launcher and the MPI library do not belong
// together.
std::string Remedy(const LauncherInfo& launcher) {
  if (launcher.family == "gloo") return "; gradred needs MPI: add --mpi to the horovodrun command";
  if (launcher.name == "srun")
    return "; choose srun's --mpi to fit the library: --mpi=pmix for Open MPI, --mpi=pmi2 for "
           "MPICH and Intel MPI";
  return "; start the job with the mpirun of that library, or set GRADRED_MPI_LIBRARY to the "
         "library of the launcher" +
         (launcher.prefix.empty() ? "" : ", in " + launcher.prefix);
}

std::string SizeOf(const LauncherInfo& launcher) {
  return launcher.name + " started " +
         (launcher.size > 0 ? std::to_string(launcher.size) : "this") +
         (launcher.size > 1 ? " processes" : " process");
}

// Before MPI_Init: under another family's launcher it finds itself alone, or ends the process.
void CheckFamily(const LauncherInfo& launcher, const Library& library) {
  if (launcher.family.empty() || launcher.family == library.family) return;
  if (launcher.family == "gloo") return;  // of one process; see OpenMpiFabric
  throw Error(Kind::kInvalidArgument,
              SizeOf(launcher) + ", but the MPI library is " + library.Describe() +
                  ", which that launcher does not start" + Remedy(launcher));
}

// After MPI_Init: never as many independent jobs as there are ranks.
void CheckSize(const LauncherInfo& launcher, const Library& library, int size) {
  if (size > 1) return;
  if (const int local_size = LocalLauncherSize(); local_size > 1)
    throw Error(Kind::kInvalidArgument,
                "GRADRED_LOCAL_SIZE says that " + std::to_string(local_size) +
                    " ranks were started without MPI, and each is alone in MPI (size 1); the MPI "
                    "library is " +
                    library.Describe() +
                    "; start the job with its mpirun, or do not ask for MPI (GRADRED_TRANSPORT, a "
                    "communicator in init)");
  if (launcher.size <= 1) return;
  throw Error(Kind::kInvalidArgument, SizeOf(launcher) +
                                          ", yet each is alone in MPI (size 1, expected " +
                                          std::to_string(launcher.size) + "); the MPI library is " +
                                          library.Describe() + Remedy(launcher));
}

template <class Abi>
void Initialize(const std::shared_ptr<Mpi<Abi>>& mpi, const LauncherInfo& launcher,
                const Library& library, bool serialized) {
  CheckFamily(launcher, library);
  int level = Abi::kThreadSingle;
  mpi->Call("MPI_Init_thread", mpi->api.Init_thread, nullptr, nullptr,
            serialized ? Abi::kThreadSerialized : Abi::kThreadMultiple, &level);
  // MPICH and Intel MPI report some errors of messages to these, and their default ends the
  // program.
  for (const auto comm : {mpi->api.comm_self, mpi->api.comm_world})
    mpi->Call("MPI_Comm_set_errhandler", mpi->api.Comm_set_errhandler, comm,
              mpi->api.errors_return);
  Process::Get().FinalizeAtExit([mpi] {
    int finalized = 1;
    if (mpi->Try(mpi->api.Finalized, &finalized) == Abi::kSuccess && !finalized)
      mpi->Try(mpi->api.Finalize);
  });
}

template <class Abi>
void CheckThreadLevel(Mpi<Abi>* mpi, const Library& library, bool ours, bool serialized) {
  int level = Abi::kThreadSingle;
  mpi->Call("MPI_Query_thread", mpi->api.Query_thread, &level);
  Process& process = Process::Get();
  if (level >= Abi::kThreadMultiple || (serialized && level >= Abi::kThreadSerialized)) {
    if (serialized) process.SetOneAtATime();
    return;
  }
  if (level < Abi::kThreadSerialized) {
    const std::string found =
        level < Abi::kThreadFunneled ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED";
    throw Error(
        Kind::kUnsupported,
        library.Describe() + (ours ? " offers only " : " was initialised with ") + found +
            ", but gradred calls MPI from threads of its own: initialise MPI with "
            "MPI_THREAD_MULTIPLE; with "
            "mpi4py leave mpi4py.rc.thread_level at 'multiple', or call gradred's init() first");
  }
  if (!process.one_at_a_time())
    Log(LogLevel::kWarning,
        library.Describe() +
            " is initialised with MPI_THREAD_SERIALIZED: gradred makes one MPI call at a "
            "time, which is slower, and no other thread may call MPI meanwhile; "
            "MPI_THREAD_MULTIPLE is better");
  process.SetOneAtATime();
}

// One rank's place in a communicator of ours.
template <class Abi>
struct Group {
  typename Abi::Comm comm;
  int rank = -1, size = 0;
};

template <class Abi>
Group<Abi> Place(Mpi<Abi>* mpi, typename Abi::Comm comm) {
  Group<Abi> group{comm};
  mpi->Call("MPI_Comm_rank", mpi->api.Comm_rank, comm, &group.rank);
  mpi->Call("MPI_Comm_size", mpi->api.Comm_size, comm, &group.size);
  return group;
}

// Collective over `parent`. Errors on the copy come back as codes.
template <class Abi>
typename Abi::Comm Duplicate(Mpi<Abi>* mpi, typename Abi::Comm parent) {
  auto comm = mpi->api.comm_null;
  mpi->Call("MPI_Comm_dup", mpi->api.Comm_dup, parent, &comm);
  mpi->Call("MPI_Comm_set_errhandler", mpi->api.Comm_set_errhandler, comm, mpi->api.errors_return);
  return comm;
}

// The communicator whose handle somebody else holds: mpi4py passes MPI._addressof(comm) and
// MPI._sizeof(comm).
template <class Abi>
typename Abi::Comm FromHandle(Mpi<Abi>* mpi, const WorldOptions& options) {
  typename Abi::Comm comm;
  if (options.mpi_comm_size != static_cast<int>(sizeof comm))
    throw Error(Kind::kInvalidArgument,
                "the handle of the communicator has " + std::to_string(options.mpi_comm_size) +
                    " bytes, expected " + std::to_string(sizeof comm) + " (" + AbiName(Abi::kKind) +
                    "): it is of another MPI than the one in use");
  std::memcpy(&comm, options.mpi_comm, sizeof comm);
  if (comm == mpi->api.comm_null)
    throw Error(Kind::kInvalidArgument, "the communicator is MPI_COMM_NULL");
  int inter = 0;
  mpi->Call("MPI_Comm_test_inter", mpi->api.Comm_test_inter, comm, &inter);
  if (inter) throw Error(Kind::kInvalidArgument, "the communicator is an intercommunicator");
  return comm;
}

// Of `parent`, ranks that are in it, each once. Collective over them.
template <class Abi>
typename Abi::Comm Subset(Mpi<Abi>* mpi, typename Abi::Comm parent, const std::vector<int>& ranks) {
  const auto& api = mpi->api;
  typename Abi::Group all, some;
  auto comm = api.comm_null;
  mpi->Call("MPI_Comm_group", api.Comm_group, parent, &all);
  mpi->Call("MPI_Group_incl", api.Group_incl, all, static_cast<int>(ranks.size()), ranks.data(),
            &some);
  mpi->Call("MPI_Comm_create_group", api.Comm_create_group, parent, some, 0, &comm);
  mpi->Call("MPI_Group_free", api.Group_free, &some);
  mpi->Call("MPI_Group_free", api.Group_free, &all);
  mpi->Call("MPI_Comm_set_errhandler", api.Comm_set_errhandler, comm, api.errors_return);
  return comm;
}

// Collective over the ranks named; the others throw and are not needed.
template <class Abi>
typename Abi::Comm FromRanks(Mpi<Abi>* mpi, const std::vector<int>& ranks) {
  const auto& api = mpi->api;
  const Group<Abi> world = Place(mpi, api.comm_world);
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  std::set<int> members;
  for (const int rank : ranks)
    if (rank < 0 || rank >= world.size || !members.insert(rank).second)
      throw Error(Kind::kInvalidArgument, "ranks [" + list + "]: " + std::to_string(rank) +
                                              " comes twice or is none of the " +
                                              std::to_string(world.size) +
                                              " ranks of MPI_COMM_WORLD");
  if (members.count(world.rank) == 0) {
    Process::Get().SetClean(true);  // nothing was begun: this process may end as it likes
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(world.rank) +
                                            " of MPI_COMM_WORLD is not in ranks [" + list + "]");
  }
  return Subset(mpi, api.comm_world, ranks);
}

template <class Abi>
void CheckTags(Mpi<Abi>* mpi) {
  int* largest = nullptr;
  int flag = 0;
  // Only MPI_COMM_WORLD has the attribute.
  mpi->Call("MPI_Comm_get_attr", mpi->api.Comm_get_attr, mpi->api.comm_world, Abi::kTagUb, &largest,
            &flag);
  if (!flag || *largest < kPostTag)
    throw Error(Kind::kUnsupported, "the MPI library allows tags up to " +
                                        std::to_string(flag ? *largest : 0) + "; gradred needs " +
                                        std::to_string(kPostTag));
}

template <class Abi>
class MpiBootstrap final : public Bootstrap {
 public:
  MpiBootstrap(Mpi<Abi>* mpi, Group<Abi> group) : mpi_(*mpi), group_(group) {}
  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }

  std::vector<std::string> AllGather(const std::string& mine) override {
    const auto& api = mpi_.api;
    const size_t size = static_cast<size_t>(group_.size);
    const int64_t nbytes = static_cast<int64_t>(mine.size());
    std::vector<int64_t> lengths(size);
    mpi_.Call("MPI_Allgather", api.Allgather, &nbytes, static_cast<int>(sizeof nbytes), api.byte,
              lengths.data(), static_cast<int>(sizeof nbytes), api.byte, group_.comm);
    std::vector<int> counts(size), offsets(size);
    int64_t total = 0;
    for (size_t r = 0; r < size; ++r) {
      offsets[r] = static_cast<int>(total);
      counts[r] = static_cast<int>(lengths[r]);
      total += lengths[r];
      if (total > INT_MAX)
        throw Error(Kind::kTransportError,
                    "opening: the ranks' descriptions have more than 2^31 bytes");
    }
    std::string all(static_cast<size_t>(total), '\0');
    mpi_.Call("MPI_Allgatherv", api.Allgatherv, mine.data(),
              counts[static_cast<size_t>(group_.rank)], api.byte, all.data(), counts.data(),
              offsets.data(), api.byte, group_.comm);
    std::vector<std::string> blobs;
    for (size_t r = 0; r < size; ++r)
      blobs.push_back(all.substr(static_cast<size_t>(offsets[r]), static_cast<size_t>(counts[r])));
    return blobs;
  }

 private:
  Mpi<Abi>& mpi_;
  const Group<Abi> group_;
};

// Without Close its communicators stay: freeing them is collective. See Note [MPI_Finalize].
template <class Abi>
class MpiFabric final : public Fabric {
 public:
  // Takes `group.comm` over.
  MpiFabric(std::shared_ptr<Mpi<Abi>> mpi, Group<Abi> group, std::string description, Nanos timeout)
      : mpi_(std::move(mpi)),
        group_(group),
        description_(std::move(description)),
        timeout_(timeout),
        bootstrap_(mpi_.get(), group),
        comms_{group.comm} {}

  Bootstrap& bootstrap() override { return bootstrap_; }

  std::unique_ptr<Transport> MakeTransport(Traffic traffic) override {
    const auto comm = comms_.emplace_back(Duplicate(mpi_.get(), group_.comm));
    std::shared_ptr<Datagrams<Abi>> datagrams;
    if (HasDatagrams(traffic)) {
      datagrams = std::make_shared<Datagrams<Abi>>(mpi_, comm, group_.rank);
      datagrams_.push_back(datagrams);
    }
    return std::make_unique<MpiTransport<Abi>>(mpi_, comm, std::move(datagrams), group_.rank,
                                               group_.size);
  }

  std::string Describe() const override { return description_; }

  // Never freed: that would be collective, and its members' use of it ends at different times.
  std::string MakeMpiCommunicator(const std::vector<int>& members) override {
    if (Process::Get().one_at_a_time())
      throw Error(Kind::kUnsupported,
                  "another library's calls of MPI: expected MPI_THREAD_MULTIPLE, got less");
    const auto comm = Subset(mpi_.get(), group_.comm, members);
    return std::string(reinterpret_cast<const char*>(&comm), sizeof comm);
  }

  void Close() override {
    if (Process::Get().over() || comms_.empty()) return;
    int finalized = 1;
    mpi_->Call("MPI_Finalized", mpi_->api.Finalized, &finalized);
    if (!finalized) {
      ExchangeLastDatagrams();
      for (auto& comm : comms_) mpi_->Call("MPI_Comm_free", mpi_->api.Comm_free, &comm);
    }
    comms_.clear();
    Process::Get().SetClean(true);
  }

  void Abort() override { Process::Get().End(); }

 private:
  // See Note [Datagrams that nobody has taken].
  void ExchangeLastDatagrams() {
    const Nanos start = Now();
    auto barrier = mpi_->api.request_null;
    bool entered = false;
    for (int passed = 0; !passed || !Idle();) {
      for (auto& datagrams : datagrams_) datagrams->Progress();
      if (!entered && Idle()) {
        mpi_->Call("MPI_Ibarrier", mpi_->api.Ibarrier, group_.comm, &barrier);
        entered = true;
      }
      if (entered && !passed)
        mpi_->Call("MPI_Test of a barrier", mpi_->api.Test, &barrier, &passed,
                   mpi_->api.status_ignore);
      if (Now() - start > timeout_)
        throw Error(Kind::kTimeout, "rank " + std::to_string(group_.rank) +
                                        ": closing MPI: the other ranks did not close within " +
                                        std::to_string(timeout_ / kSecond) + " s");
      if (!passed) sched_yield();
    }
    datagrams_.clear();
  }

  bool Idle() const {
    return std::all_of(datagrams_.begin(), datagrams_.end(),
                       [](const auto& datagrams) { return datagrams->idle(); });
  }

  const std::shared_ptr<Mpi<Abi>> mpi_;
  const Group<Abi> group_;
  const std::string description_;
  const Nanos timeout_;
  MpiBootstrap<Abi> bootstrap_;
  std::vector<typename Abi::Comm> comms_;
  std::vector<std::shared_ptr<Datagrams<Abi>>> datagrams_;
};

// A later mpi4py takes the same library. Not for a program that is linked to MPI statically.
void TellMpi4py(const Library& library) {
  if (library.path.find(".so") != std::string::npos)
    setenv("MPI4PY_LIBMPI", library.path.c_str(), 1);
}

template <class Abi>
std::unique_ptr<Fabric> Open(const WorldOptions& options, const LauncherInfo& launcher,
                             const Library& library) {
  const auto mpi = std::make_shared<Mpi<Abi>>(library);
  const bool ours = !library.initialized;
  if (options.mpi_comm && ours)
    throw Error(Kind::kInvalidArgument, "a communicator was given, but MPI was not initialised");
  Process::Get().SetClean(true);  // what fails now fails alike on all ranks
  if (ours) Initialize(mpi, launcher, library, options.mpi_serialized);
  TellMpi4py(library);
  CheckThreadLevel(mpi.get(), library, ours, options.mpi_serialized);
  const Group<Abi> world = Place(mpi.get(), mpi->api.comm_world);
  CheckSize(launcher, library, world.size);
  CheckTags(mpi.get());
  Process::Get().SetClean(false);
  typename Abi::Comm comm;
  if (options.mpi_comm)
    comm = Duplicate(mpi.get(), FromHandle(mpi.get(), options));
  else if (!options.ranks.empty())
    comm = FromRanks(mpi.get(), options.ranks);
  else
    comm = Duplicate(mpi.get(), mpi->api.comm_world);
  const std::string description =
      library.Describe() + ", " + AbiName(Abi::kKind) +
      (Process::Get().initialized_here() ? "" : ", initialised by the program") +
      (Process::Get().one_at_a_time() ? ", one call at a time" : "");
  return std::make_unique<MpiFabric<Abi>>(mpi, Place(mpi.get(), comm), description,
                                          options.timeout);
}

template <class Abi>
int WorldSize(const Library& library) {
  Mpi<Abi> mpi(library);
  return Place(&mpi, mpi.api.comm_world).size;
}

}  // namespace
}  // namespace mpi

std::unique_ptr<Fabric> OpenMpiFabric(const WorldOptions& options) {
  mpi::Process::Get().ThrowIfOver();
  const LauncherInfo launcher = FindLauncher();
  if (launcher.family == "gloo" && launcher.size > 1 && !MpiIsInitialized())
    throw Error(Kind::kInvalidArgument,
                mpi::SizeOf(launcher) + ", which MPI cannot join" + mpi::Remedy(launcher));
  const mpi::Library library = mpi::ChooseLibrary(options, launcher);
  if (library.finalized)
    throw Error(Kind::kInvalidArgument,
                library.Describe() +
                    " was finalised in this process, and MPI cannot be initialised "
                    "twice: call gradred's init() before MPI_Finalize, in a new process");
  switch (library.abi) {
    case mpi::AbiKind::kOpenMpi:
      return mpi::Open<mpi::OpenMpiAbi>(options, launcher, library);
    case mpi::AbiKind::kMpich:
      return mpi::Open<mpi::MpichAbi>(options, launcher, library);
    case mpi::AbiKind::kStandard:
      return mpi::Open<mpi::StandardAbi>(options, launcher, library);
    case mpi::AbiKind::kUnknown:
      break;
  }
  throw Error(Kind::kInternal,
              "an MPI library of unknown binary interface was chosen: " + library.Describe());
}

void LeaveMpi() { mpi::Process::Get().End(); }

bool MpiIsInitialized() {
  for (const mpi::Library& library : mpi::LoadedLibraries())
    if (library.initialized && !library.finalized) return true;
  return false;
}

int InitializedMpiSize() {
  for (const mpi::Library& library : mpi::LoadedLibraries()) {
    if (!library.initialized || library.finalized) continue;
    switch (library.abi) {
      case mpi::AbiKind::kOpenMpi:
        return mpi::WorldSize<mpi::OpenMpiAbi>(library);
      case mpi::AbiKind::kMpich:
        return mpi::WorldSize<mpi::MpichAbi>(library);
      case mpi::AbiKind::kStandard:
        return mpi::WorldSize<mpi::StandardAbi>(library);
      case mpi::AbiKind::kUnknown:
        return 1;  // OpenMpiFabric refuses it
    }
  }
  return 0;
}

}  // namespace gradred::comm
