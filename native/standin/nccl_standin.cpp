// NCCL's C interface on host memory, for tests: ranks are threads of one process. Where NCCL hangs
// or computes nonsense (ranks that disagree, memory of another device, a communicator that is gone)
// this one reports an error.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "nccl_reduce.h"
#include "standin.h"

namespace {

constexpr int kSuccess = 0, kUnhandledCudaError = 1, kSystemError = 2, kInvalidArgument = 4,
              kInvalidUsage = 5, kInProgress = 7;
constexpr int kBuiltInOps = 5;
constexpr auto kInitLimit = std::chrono::seconds(20);

enum class What { kAllReduce, kReduceScatter, kReduce, kAllGather, kBroadcast };
const char* NameOf(What what) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduceScatter", "ncclReduce",
                                    "ncclAllGather", "ncclBroadcast"};
  return kNames[static_cast<int>(what)];
}

using Scalar = std::shared_ptr<const std::vector<char>>;

struct Call {
  What what{};
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  int type = 0, op = 0, root = 0;
  Scalar scalar;  // of a made operation

  bool Agrees(const Call& o) const {
    return what == o.what && count == o.count && type == o.type && op == o.op && root == o.root &&
           (!scalar == !o.scalar) && (!scalar || *scalar == *o.scalar);
  }
  std::string Text() const {
    return std::string(NameOf(what)) + "(count " + std::to_string(count) + ", type " +
           std::to_string(type) + ", op " + std::to_string(op) + ", root " + std::to_string(root) +
           ")";
  }
};

// One collective: the last rank to come does the work for all.
struct Meeting {
  std::vector<Call> calls;
  int arrived = 0, left = 0;
  bool done = false, withdrawn = false;
};

struct Comm;

// What the ranks of one communicator share.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0, joined = 0;
  bool refused = false;
  std::vector<Comm*> members;
  std::map<uint64_t, Meeting> meetings;
};

struct Comm {
  std::shared_ptr<Clique> clique;
  int rank = 0, device = 0;
  uint64_t next = 0;        // of the calling thread: number of its next collective
  std::vector<Scalar> ops;  // made with ncclRedOpCreatePreMulSum; null: destroyed
  std::atomic<int> unfinished{0}, error{kSuccess};
  bool aborted = false;  // under the clique's mutex
};

struct Registry {
  std::mutex mutex;
  std::map<const void*, std::shared_ptr<Comm>> live;
  std::vector<std::shared_ptr<Comm>> dead;  // kept, so that no new one gets an old address
  std::map<uint64_t, std::shared_ptr<Clique>> cliques;
  uint64_t last_id = 0;
};
// Never destroyed: threads of streams may still be running at exit.
Registry& Global() {
  static Registry* const registry = new Registry;
  return *registry;
}

thread_local std::string last_error;
int Fail(int code, const std::string& text) {
  last_error = "stand-in: " + text;
  return code;
}

std::shared_ptr<Comm> Find(const void* comm) {
  const std::lock_guard<std::mutex> lock(Global().mutex);
  const auto found = Global().live.find(comm);
  return found == Global().live.end() ? nullptr : found->second;
}

std::vector<const void*> SendsAt(const Meeting& m, size_t nbytes) {
  std::vector<const void*> sends;
  for (const Call& c : m.calls) sends.push_back(static_cast<const char*>(c.send) + nbytes);
  return sends;
}

// All have come and agree. Results go through memory of their own, as in-place calls overwrite what
// others still read.
void Perform(const Meeting& m) {
  const Call& first = m.calls[0];
  const size_t nbytes = first.count * SizeOf(first.type), n = m.calls.size();
  const void* const scalar = first.scalar ? first.scalar->data() : nullptr;
  std::vector<char> result(
      first.what == What::kReduceScatter || first.what == What::kAllGather ? n * nbytes : nbytes);
  switch (first.what) {
    case What::kAllReduce:
    case What::kReduce:
      ReduceInputs(first.type, first.op, scalar, SendsAt(m, 0), result.data(), first.count);
      break;
    case What::kReduceScatter:
      for (size_t r = 0; r < n; ++r)
        ReduceInputs(first.type, first.op, scalar, SendsAt(m, r * nbytes),
                     result.data() + r * nbytes, first.count);
      break;
    case What::kAllGather:
      for (size_t r = 0; r < n; ++r)
        std::memcpy(result.data() + r * nbytes, m.calls[r].send, nbytes);
      break;
    case What::kBroadcast:
      std::memcpy(result.data(), m.calls[static_cast<size_t>(first.root)].send, nbytes);
      break;
  }
  for (size_t r = 0; r < n; ++r) {
    if (first.what == What::kReduce && static_cast<int>(r) != first.root) continue;
    const bool scattered = first.what == What::kReduceScatter;
    std::memcpy(m.calls[r].recv, result.data() + (scattered ? r * nbytes : 0),
                scattered ? nbytes : result.size());
  }
}

// On the stream's thread.
void Meet(Comm& comm, uint64_t number, const Call& call) {
  Clique& clique = *comm.clique;
  std::unique_lock<std::mutex> lock(clique.mutex);
  Meeting& m = clique.meetings[number];
  m.calls.resize(static_cast<size_t>(clique.size));
  m.calls[static_cast<size_t>(comm.rank)] = call;
  if (++m.arrived == clique.size && !m.withdrawn) {
    const bool agree =
        std::all_of(m.calls.begin(), m.calls.end(), [&](const Call& c) { return c.Agrees(call); });
    if (agree)
      Perform(m);
    else
      for (Comm* member : clique.members) member->error = kInvalidUsage;
    m.done = true;
    clique.changed.notify_all();
  }
  clique.changed.wait(lock, [&] { return m.done || comm.aborted; });
  if (!m.done) m.withdrawn = true;  // its memory may go away now: nobody touches it any more
  if (++m.left == clique.size) clique.meetings.erase(number);
  --comm.unfinished;
}

struct Task {
  std::shared_ptr<Comm> comm;
  uint64_t number;
  Call call;
};
void RunTask(void* data) {
  const std::unique_ptr<Task> task(static_cast<Task*>(data));
  Meet(*task->comm, task->number, task->call);
}

struct Grouped {
  std::shared_ptr<Comm> comm;
  void* stream;
  Call call;
};
thread_local int group_depth = 0;
thread_local std::vector<Grouped> grouped;
thread_local int group_error = kSuccess;

void Start(const Grouped& g) {
  ++g.comm->unfinished;
  StandinEnqueue(g.stream, RunTask, new Task{g.comm, g.comm->next++, g.call});
}

bool Overlap(const void* a, size_t a_nbytes, const void* b, size_t b_nbytes) {
  const char *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  return x < y + b_nbytes && y < x + a_nbytes;
}

int CheckMemory(const Comm& comm, const Call& c) {
  const size_t one = c.count * SizeOf(c.type), all = one * static_cast<size_t>(comm.clique->size);
  const size_t send_nbytes = c.what == What::kReduceScatter ? all : one;
  const size_t recv_nbytes = c.what == What::kAllGather ? all : one;
  const bool sends = c.what != What::kBroadcast || c.root == comm.rank;
  const bool receives = c.what != What::kReduce || c.root == comm.rank;
  const std::string name = NameOf(c.what);
  if (sends && !StandinIsDeviceMemory(c.send, send_nbytes, comm.device))
    return Fail(kInvalidArgument, name + ": sendbuff is not " + std::to_string(send_nbytes) +
                                      " bytes of cudaMalloc on device " +
                                      std::to_string(comm.device));
  if (receives && !StandinIsDeviceMemory(c.recv, recv_nbytes, comm.device))
    return Fail(kInvalidArgument, name + ": recvbuff is not " + std::to_string(recv_nbytes) +
                                      " bytes of cudaMalloc on device " +
                                      std::to_string(comm.device));
  const size_t shift = static_cast<size_t>(comm.rank) * one;
  const char *send = static_cast<const char*>(c.send), *recv = static_cast<const char*>(c.recv);
  const bool in_place = c.what == What::kReduceScatter ? recv == send + shift
                        : c.what == What::kAllGather   ? send == recv + shift
                                                       : recv == send;
  if (sends && receives && !in_place && Overlap(send, send_nbytes, recv, recv_nbytes))
    return Fail(kInvalidArgument, name + ": the buffers overlap and are not in place");
  return kSuccess;
}

int CheckedCall(const void* handle, void* stream, Call c, bool has_op) {
  const std::string name = NameOf(c.what);
  const auto comm = Find(handle);
  if (!comm) return Fail(kInvalidArgument, name + ": no such communicator, or destroyed");
  if (comm->error != kSuccess)
    return Fail(kInvalidUsage, name + ": the communicator has failed before");
  if (SizeOf(c.type) == 0) return Fail(kInvalidArgument, name + ": no such data type");
  if (c.root < 0 || c.root >= comm->clique->size)
    return Fail(kInvalidArgument, name + ": no such root");
  if (has_op && c.op >= kBuiltInOps) {
    const size_t made = static_cast<size_t>(c.op - kBuiltInOps);
    if (made >= comm->ops.size() || !comm->ops[made])
      return Fail(kInvalidArgument, name + ": no such operation, or destroyed");
    c.scalar = comm->ops[made];
    if (c.scalar->size() != SizeOf(c.type) + 1 || (*c.scalar)[0] != static_cast<char>(c.type))
      return Fail(kInvalidArgument, name + ": the operation is made for another data type");
    c.scalar = std::make_shared<const std::vector<char>>(c.scalar->begin() + 1, c.scalar->end());
  } else if (has_op && c.op < 0) {
    return Fail(kInvalidArgument, name + ": no such operation");
  }
  if (StandinCurrentDevice() != comm->device)
    return Fail(kInvalidUsage, name + ": another device is current than the communicator's");
  if (StandinStreamDevice(stream) != comm->device)
    return Fail(kUnhandledCudaError, name + ": no such stream on the communicator's device");
  if (c.count == 0) return kSuccess;
  if (const int bad = CheckMemory(*comm, c)) return bad;
  if (group_depth > 0)
    grouped.push_back({comm, stream, c});
  else
    Start({comm, stream, c});
  return kSuccess;
}

int Issue(const void* handle, void* stream, const Call& c, bool has_op) {
  const int result = CheckedCall(handle, stream, c, has_op);
  if (result != kSuccess && group_depth > 0) group_error = result;
  return result;
}

}  // namespace

extern "C" {

struct ncclUniqueId {
  char internal[128];
};

int StandinNcclLive() {
  const std::lock_guard<std::mutex> lock(Global().mutex);
  return static_cast<int>(Global().live.size());
}

int ncclGetVersion(int* version) {
  if (!version) return kInvalidArgument;
  *version = 22304;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error";
    case kSystemError:
      return "unhandled system error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}
const char* ncclGetLastError(const void*) { return last_error.c_str(); }

int ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return kInvalidArgument;
  Registry& g = Global();
  const std::lock_guard<std::mutex> lock(g.mutex);
  std::memset(id, 0, sizeof *id);
  ++g.last_id;
  std::memcpy(id->internal, &g.last_id, sizeof g.last_id);
  g.cliques[g.last_id] = std::make_shared<Clique>();
  return kSuccess;
}

int ncclCommInitRank(void** out, int nranks, ncclUniqueId id, int rank) {
  if (!out || nranks < 1 || rank < 0 || rank >= nranks)
    return Fail(kInvalidArgument,
                "ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(nranks));
  Registry& g = Global();
  uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  const auto comm = std::make_shared<Comm>();
  {
    const std::lock_guard<std::mutex> lock(g.mutex);
    const auto found = g.cliques.find(number);
    if (found == g.cliques.end())
      return Fail(kInvalidArgument, "ncclCommInitRank: no such unique id");
    comm->clique = found->second;
  }
  comm->rank = rank;
  comm->device = StandinCurrentDevice();
  Clique& clique = *comm->clique;
  std::unique_lock<std::mutex> lock(clique.mutex);
  if (clique.size == 0) {
    clique.size = nranks;
    clique.members.resize(static_cast<size_t>(nranks));
  }
  const bool known = clique.size == nranks && !clique.members[static_cast<size_t>(rank)];
  const bool duplicate = std::any_of(clique.members.begin(), clique.members.end(),
                                     [&](const Comm* m) { return m && m->device == comm->device; });
  if (!known || duplicate) {
    clique.refused = true;
    clique.changed.notify_all();
    return Fail(kInvalidUsage,
                duplicate ? "ncclCommInitRank: Duplicate GPU detected"
                          : "ncclCommInitRank: ranks disagree on the size, or a rank comes twice");
  }
  clique.members[static_cast<size_t>(rank)] = comm.get();
  ++clique.joined;
  clique.changed.notify_all();
  const bool complete = clique.changed.wait_for(
      lock, kInitLimit, [&] { return clique.joined == nranks || clique.refused; });
  if (!complete || clique.refused) {
    clique.refused = true;
    clique.changed.notify_all();
    return Fail(kSystemError, complete ? "ncclCommInitRank: a rank was refused"
                                       : "ncclCommInitRank: a rank did not come");
  }
  const std::lock_guard<std::mutex> global(g.mutex);
  g.cliques.erase(number);
  g.live[comm.get()] = comm;
  *out = comm.get();
  return kSuccess;
}

int ncclCommDestroy(const void* handle) {
  const auto comm = Find(handle);
  if (!comm)
    return Fail(kInvalidArgument, "ncclCommDestroy: no such communicator, or destroyed before");
  if (comm->unfinished > 0)
    return Fail(kInvalidUsage, "ncclCommDestroy: operations are unfinished");
  const std::lock_guard<std::mutex> lock(Global().mutex);
  Global().live.erase(handle);
  Global().dead.push_back(comm);
  return kSuccess;
}

int ncclCommAbort(const void* handle) {
  const auto comm = Find(handle);
  if (!comm)
    return Fail(kInvalidArgument, "ncclCommAbort: no such communicator, or destroyed before");
  {
    const std::lock_guard<std::mutex> lock(comm->clique->mutex);
    comm->aborted = true;
    comm->clique->changed.notify_all();
  }
  const std::lock_guard<std::mutex> lock(Global().mutex);
  Global().live.erase(handle);
  Global().dead.push_back(comm);
  return kSuccess;
}

int ncclCommGetAsyncError(const void* handle, int* error) {
  const auto comm = Find(handle);
  if (!comm || !error)
    return Fail(kInvalidArgument, "ncclCommGetAsyncError: no such communicator, or destroyed");
  *error = comm->error;
  if (*error != kSuccess)
    Fail(*error, "the ranks' calls do not match in operation, count, type, op or root");
  return kSuccess;
}

int ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int residence,
                             const void* handle) {
  const auto comm = Find(handle);
  if (!comm || !op || !scalar || SizeOf(type) == 0 || residence != 1)
    return Fail(kInvalidArgument,
                "ncclRedOpCreatePreMulSum: bad argument (the scalar has to be in host memory)");
  std::vector<char> typed(1, static_cast<char>(type));
  const char* const bytes = static_cast<const char*>(scalar);
  typed.insert(typed.end(), bytes, bytes + SizeOf(type));
  comm->ops.push_back(std::make_shared<const std::vector<char>>(std::move(typed)));
  *op = kBuiltInOps + static_cast<int>(comm->ops.size()) - 1;
  return kSuccess;
}

int ncclRedOpDestroy(int op, const void* handle) {
  const auto comm = Find(handle);
  const size_t made = static_cast<size_t>(op - kBuiltInOps);
  if (!comm || op < kBuiltInOps || made >= comm->ops.size() || !comm->ops[made])
    return Fail(kInvalidArgument, "ncclRedOpDestroy: no such operation, or destroyed before");
  comm->ops[made] = nullptr;
  return kSuccess;
}

int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, const void* comm,
                  void* stream) {
  return Issue(comm, stream, {What::kAllReduce, send, recv, count, type, op, 0, nullptr}, true);
}
int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op,
                      const void* comm, void* stream) {
  return Issue(comm, stream, {What::kReduceScatter, send, recv, count, type, op, 0, nullptr}, true);
}
int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root,
               const void* comm, void* stream) {
  return Issue(comm, stream, {What::kReduce, send, recv, count, type, op, root, nullptr}, true);
}
int ncclAllGather(const void* send, void* recv, size_t count, int type, const void* comm,
                  void* stream) {
  return Issue(comm, stream, {What::kAllGather, send, recv, count, type, 0, 0, nullptr}, false);
}
int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, const void* comm,
                  void* stream) {
  return Issue(comm, stream, {What::kBroadcast, send, recv, count, type, 0, root, nullptr}, false);
}

int ncclGroupStart() {
  if (group_depth++ == 0) group_error = kSuccess;
  return kSuccess;
}
int ncclGroupEnd() {
  if (group_depth == 0) return Fail(kInvalidUsage, "ncclGroupEnd: without ncclGroupStart");
  if (--group_depth > 0) return kSuccess;
  const std::vector<Grouped> calls = std::move(grouped);
  grouped.clear();
  if (group_error != kSuccess) return group_error;  // nothing of the group starts
  for (const Grouped& call : calls) Start(call);
  return kSuccess;
}

}  // extern "C"
