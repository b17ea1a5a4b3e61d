// Opening and closing: the world first, then (settings compared by gradred/basics.py) the engine
// over it.
#include <sstream>
#include <vector>

#include "base/log.h"
#include "bindings.h"
#include "comm/algorithm_communicator.h"
#include "comm/mpi/mpi_library.h"
#include "comm/mpi/mpi_process.h"

namespace gradred::bindings {
namespace {

// Channel of the exchange of notes: above those of any process set, and not the one a world closes
// on.
constexpr uint16_t kNotesChannel = comm::kChannels - 2;

std::unique_ptr<comm::World>
    opened_world;  // between open_world and start_engine; guarded by the GIL

template <class T>
T Get(const py::dict& options, const char* key) {
  return options[key].cast<T>();
}

Nanos Seconds(const py::dict& options, const char* key) {
  return static_cast<Nanos>(Get<double>(options, key) * kSecond);
}

comm::WorldOptions WorldOptionsFrom(const py::dict& options) {
  comm::WorldOptions o;
  o.transport = Get<std::string>(options, "transport");
  o.intra = Get<std::string>(options, "intra");
  o.virtual_nodes = Get<int>(options, "virtual_nodes");
  o.mpi_library = Get<std::string>(options, "mpi_library");
  o.mpi_serialized = Get<std::string>(options, "mpi_threads") == "serialized";
  o.prefix = Get<std::string>(options, "prefix");
  o.mpi_comm = reinterpret_cast<const void*>(Get<uintptr_t>(options, "mpi_comm"));
  o.mpi_comm_size = Get<int>(options, "mpi_comm_size");
  for (const py::handle rank : Get<py::list>(options, "ranks")) o.ranks.push_back(rank.cast<int>());
  o.chunk_nbytes = Get<int64_t>(options, "chunk_bytes");
  o.algorithms = Get<std::string>(options, "algorithms");
  o.reproducible = Get<bool>(options, "reproducible");
  o.timeout = Seconds(options, "init_timeout_seconds");
  o.problem = Get<std::string>(options, "problem");
  return o;
}

// The core of this rank's threads out of "3,7", by local rank; -1: none is named.
int CoreOf(const std::string& cores, int local_rank) {
  std::istringstream list(cores);
  std::string core;
  for (int i = 0; std::getline(list, core, ','); ++i)
    if (i == local_rank) return std::stoi(core);
  if (!cores.empty())
    Log(LogLevel::kWarning, "GRADRED_THREAD_AFFINITY=" + cores + ": no core for local rank " +
                                std::to_string(local_rank));
  return -1;
}

engine::EngineOptions EngineOptionsFrom(const py::dict& options, int local_rank) {
  engine::EngineOptions o;
  o.thread_core = CoreOf(Get<std::string>(options, "thread_affinity"), local_rank);
  o.stall_warn = Seconds(options, "stall_warn_seconds");
  o.stall_fail = Seconds(options, "stall_fail_seconds");
  o.transport_timeout = Seconds(options, "transport_timeout_seconds");
  o.slot_nbytes = Get<int64_t>(options, "slot_bytes");
  o.plan_batches = Get<int>(options, "plan_batches");
  const std::string spare = Get<std::string>(options, "spare_core");
  o.spare_core = spare == "yes"  ? engine::SpareCore::kYes
                 : spare == "no" ? engine::SpareCore::kNo
                                 : engine::SpareCore::kAuto;
  o.null = Get<bool>(options, "null");
  return o;
}

// Every rank's note, in rank order. Sizes and bytes travel flat over the control transport: nothing
// that a setting can change comes into it.
std::vector<std::string> ExchangeNotes(comm::World& world, const std::string& mine, Nanos timeout) {
  comm::Transport& transport = world.control();
  std::vector<int> everyone(transport.size());
  for (int r = 0; r < transport.size(); ++r) everyone[r] = r;
  const auto communicator = comm::MakeAlgorithmCommunicator(transport, everyone, kNotesChannel);
  const auto gather = [&](const void* data, void* all, std::vector<int64_t> nbytes) {
    const comm::WorkPtr work = communicator->AllGatherV(data, all, std::move(nbytes));
    world.Wait(*work, timeout, "exchange of settings at init");
  };

  const int64_t my_nbytes = static_cast<int64_t>(mine.size());
  std::vector<int64_t> nbytes(everyone.size());
  gather(&my_nbytes, nbytes.data(), std::vector<int64_t>(everyone.size(), sizeof(int64_t)));
  int64_t total = 0;
  for (const int64_t n : nbytes) total += n;
  std::string all(total, '\0');
  gather(mine.data(), all.data(), nbytes);

  std::vector<std::string> notes;
  int64_t offset = 0;
  for (const int64_t n : nbytes) {
    notes.push_back(all.substr(offset, n));
    offset += n;
  }
  return notes;
}

py::list OpenWorld(const py::dict& options, const std::string& note) {
  if (opened_world || engine::GlobalOrNull())
    throw Error(Kind::kInternal, "open_world: a world is open already");
  const comm::WorldOptions o = WorldOptionsFrom(options);
  std::unique_ptr<comm::World> world;
  std::vector<std::string> notes;
  {
    py::gil_scoped_release release;
    world = comm::OpenWorld(o);
    notes = ExchangeNotes(*world, note, o.timeout);
  }
  opened_world = std::move(world);
  py::list result;
  for (const std::string& text : notes) result.append(text);
  return result;
}

void CloseWorld() {
  const auto world = std::move(opened_world);
  if (!world) return;
  py::gil_scoped_release release;
  world->Close();
}

void StartEngine(const py::dict& options) {
  if (!opened_world) throw Error(Kind::kInternal, "start_engine: no world is open");
  const engine::EngineOptions o = EngineOptionsFrom(options, opened_world->topology().local_rank);
  auto world = std::move(opened_world);
  py::gil_scoped_release release;
  engine::SetGlobal(std::make_shared<engine::Engine>(std::move(world), o));
}

// The MPI library that is initialised in this process: (path, version, family), or None.
py::object MpiLibrary() {
  for (const comm::mpi::Library& library : comm::mpi::LoadedLibraries()) {
    if (library.initialized) return py::make_tuple(library.path, library.version, library.family);
  }
  return py::none();
}

// Rows (collective, from_nbytes, algorithm, reproducible, why) of `size` ranks that exchange
// messages, with what the setting's text puts in their place.
py::list Algorithms(int size, const std::string& text, bool reproducible) {
  py::list rows;
  for (const comm::AlgorithmRow& row :
       comm::MergeAlgorithms(size, comm::ParseAlgorithms(text, reproducible))) {
    rows.append(py::make_tuple(row.collective, row.from_nbytes, comm::AlgorithmName(row.algorithm),
                               comm::IsReproducible(row.algorithm), row.why));
  }
  return rows;
}

}  // namespace

void BindWorld(py::module_& m) {
  m.def("open_world", &OpenWorld, py::arg("options"), py::arg("note"));
  m.def("close_world", &CloseWorld);
  m.def("start_engine", &StartEngine, py::arg("options"));
  m.def("mpi_library", &MpiLibrary);
  m.def("mpi_one_at_a_time", [] { return comm::mpi::Process::Get().one_at_a_time(); });
  m.def("mpi_is_over", [] { return comm::mpi::Process::Get().over(); });
  m.def("algorithms", &Algorithms, py::arg("size"), py::arg("text"), py::arg("reproducible"));
}

}  // namespace gradred::bindings
