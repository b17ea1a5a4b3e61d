// The engine of one rank: takes submissions from any thread, agrees with the other ranks on what
// runs, runs it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "engine/measured.h"
#include "engine/spec.h"

namespace gradred::engine {

struct EngineOptions {
  Nanos stall_warn = 60 * kSecond;          // 0: never
  Nanos stall_fail = 0;                     // 0: never. Absence is no fault unless the user says so
  Nanos transport_timeout = 30 * kSecond;   // agreed work that does not move
  int64_t slot_nbytes = 1 << 20;            // of the largest group that is packed early
  int thread_core = -1;                     // where the loops' threads run; -1: anywhere
  int plan_batches = 8;                     // measured for a plan
  SpareCore spare_core = SpareCore::kAuto;  // whether ranks leave a core idle while they compute
  bool null = false;  // GRADRED_NULL: return the inputs, talk to nobody (to measure what
                      // communication costs)
};

struct Metrics {
  int64_t batches = 0, groups = 0, entries = 0;
  int64_t bytes = 0;  // of tensors, once each
  int64_t rounds = 0, empty_rounds = 0, unions = 0;
  int64_t non_finite = 0;     // groups' elements that were infinite or NaN when packed, summed over
                              // ranks (of a reducescatter: on this rank)
  int64_t saturated = 0;      // finite elements that the wire dtype turned infinite, as above
  int64_t partly_absent = 0;  // members present on some ranks only
  int64_t abandoned = 0;
  int64_t plan_changes = 0;   // of planned domains, after measurements
  int64_t network_bytes = 0;  // of tensors' messages sent to other nodes
  double wait_s = 0;          // sum over batches: last local submit to last result
  double last_wait_s = 0;
  double communication_s = 0;  // data loop busy with groups
  int64_t packed_early = 0;    // members packed by the thread that submitted them
  int64_t fusion_buffer_nbytes = 0;
  // Of the process's pool of pages: memory of large results, alive or kept for the next ones; how
  // many were of fresh pages, and how many of pages touched before.
  int64_t pool_nbytes = 0, pool_fresh = 0, pool_reused = 0;
};

class OpenBatch;  // one pass over a domain, on this rank, as its caller sees it
using OpenBatchPtr = std::shared_ptr<OpenBatch>;
struct PlanReport;  // engine/plan_report.h

// Who goes on when a submission has completed a group.
enum class Then {
  kLeave,  // the engine's threads; the caller may hold locks
  kStep,   // this thread does what can be done at once, instead of waking another
  kWait,   // the caller calls StepUntil next, which does it
};

// In a forked child the engine is its parent's: what has no result does nothing there, the rest
// throws kNotInitialized.
class Engine {
 public:
  // Takes the world over and starts the threads (control, data, completion).
  Engine(std::unique_ptr<comm::World> world, EngineOptions options);
  // Without a Shutdown before: aborts.
  ~Engine();

  const comm::Topology& topology() const;
  comm::World& world();

  // Starts the next batch of a domain; any thread, does not wait. `spec` must be complete(). Then
  // Submit each position once, from any thread, or Abandon. Batches of one domain run in the order
  // of Open. The entries travel as listed, proposed or planned: See Note [Plans of a domain] in
  // plan_book.h; positions are those of the list in any case. Throws kInvalidArgument for a wrong
  // spec or unknown process set or one that this rank is no member of, and the engine's first cause
  // when it has failed.
  OpenBatchPtr Open(const DomainSpecPtr& spec);
  // Does not wait and does not throw for failures of the engine: those reach `done`.
  // kInvalidArgument when the position was submitted already.
  // With kStep and kWait the caller holds no lock: callbacks of any batch may run before it
  // returns.
  void Submit(const OpenBatchPtr& batch, int position, Submission submission,
              Then then = Then::kLeave);
  // For a caller that waits for a result and holds no lock: moves the engine on in this thread
  // until `done`, or until nothing has moved for a while, or for `longest`; the engine's threads
  // then go on by themselves. Callbacks of any batch may run here. Not from a callback: there it
  // does nothing.
  void StepUntil(const std::function<bool()>& done, Nanos longest = kForever);
  // No more submits will come for this batch: its groups that have not run fail here and on the
  // peers (kAbandoned with this rank and reason).
  void Abandon(const OpenBatchPtr& batch, const std::string& reason);

  // Open, submit all, wait; results in order. Throws the first error.
  std::vector<Result> RunBlocking(const DomainSpecPtr& spec, std::vector<Submission> submissions);

  // Collective over the world: ranks ascending. Returns the set's id (> 0), the same everywhere,
  // and never that of another set; waits. Threads that add or remove sets at once get a Mismatch,
  // alike on all ranks, when those of two ranks come in different orders.
  int AddProcessSet(const std::vector<int>& ranks);
  // Collective over the world; waits. Batches that all members have submitted whole still run,
  // others fail with kAbandoned; later ones are refused with kInvalidArgument.
  void RemoveProcessSet(int id);
  std::vector<int> ProcessSetRanks(int id) const;  // throws kInvalidArgument

  // Waits until all ranks have joined; returns the last rank to join. Meanwhile reductions of the
  // others get zeros from here.
  int Join();

  // Waits until all ranks shut down; work pending on others fails there with kAbandoned, this rank
  // and `reason`.
  void Shutdown(const std::string& reason);
  // Ends the engine of every rank: `cause` reaches all through the side channel.
  void Abort(const Status& cause);

  Status failure() const;  // the first cause; ok while the engine works
  Metrics metrics() const;
  // One domain's groups as text lines, for gradred.plan().
  std::string DescribePlan(const std::string& domain) const;
  // Of the domains with a proposal or a plan that have begun here, in the order in which they did.
  std::vector<PlanReport> PlanReports() const;

  void RefuseChild() const;  // throws kNotInitialized in a forked child, where nothing goes on

 private:
  class Impl;
  bool InChild() const;
  Impl& Mine() const;  // throws kNotInitialized in a forked child
  std::unique_ptr<Impl> impl_;
  const int pid_, forks_;
};

// --- The process's engine
// --------------------------------------------------------------------------------------------------
// What the bindings and the TensorFlow ops share. A forked child has none: kNotInitialized with the
// reason.
void SetGlobal(std::shared_ptr<Engine> engine);
std::shared_ptr<Engine> Global();  // throws kNotInitialized
std::shared_ptr<Engine> GlobalOrNull();

// Specs by domain name, or another key, written when a graph is traced and read when it runs.
// Thread-safe; a later one replaces an earlier one.
void RegisterSpec(DomainSpecPtr spec);
void RegisterSpec(const std::string& key, DomainSpecPtr spec);
DomainSpecPtr FindSpec(const std::string& name);  // null when unknown
void ForgetSpec(const std::string& name);

}  // namespace gradred::engine
