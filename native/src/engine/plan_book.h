// Which order and groups each batch of a domain has: the same on all ranks for the same batch.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/background.h"
#include "engine/measured.h"
#include "engine/open_batch.h"
#include "engine/plan_report.h"

namespace gradred::engine {

// Note [Plans of a domain]
// A domain is listed alike on all ranks. It should travel in the order in which its entries become
// ready, in groups that hide each other; for that each rank has a proposal from its graph, and a
// planned domain is measured. What a batch looks like must be the same on all ranks, so it follows
// from its number alone, and from what earlier batches have agreed on in entries of their own:
//   kCompare   the ranks compare digests of what each would do next; if all are equal, it counts
//              from the next batch on, else everything stays
//   kProbe     groups of some sizes, whose times are measured
//   kExchange  the maxima over the ranks of what each has measured; from these every rank makes the
//              same proposal (pure functions of integers) in a thread of its own, and the third
//              batch from there is a kCompare
// The first batch compares the proposals of the graphs, the next one of a planned domain probes,
// two warm up, `plan_batches` are measured, the next one exchanges. A batch that begins before an
// earlier one has decided what it looks like is held: what is submitted is kept, nothing waits.
// A batch that fails fails on all ranks, with its entries here or there: then it has not decided,
// and the next one does.
// Batch numbers are in step because every rank opens every batch of a domain: but for those that
// joined. So the end of a join, after which everybody's next batch is a common one, begins
// everything anew. During a join nothing needs to: those who joined bring the neutral element.
// Graphs may bring different lists under one name, one after the other. Each has its own plan; they
// share the numbers, and what is due at a number is done by the first batch of the list from there
// on: so a batch in which ranks brought different lists, a mismatch, leaves them in step.

// What the book needs of the engine. Any thread.
class BatchRunner {
 public:
  virtual ~BatchRunner() = default;
  virtual BatchPtr Make(const DomainSpecPtr& spec) = 0;
  virtual void Start(const BatchPtr& batch) = 0;  // in the order of calls
  virtual void Submit(const BatchPtr& batch, int place, Submission submission) = 0;
  virtual void Abandon(const BatchPtr& batch, const std::string& reason) = 0;
};

struct PlanOptions {
  int batches = 8;  // measured for a plan
  SpareCore spare_core = SpareCore::kAuto;
  double cores = 1;  // of this rank
};

class PlanBook : public std::enable_shared_from_this<PlanBook> {
 public:
  PlanBook(BatchRunner* runner, PlanOptions options, std::shared_ptr<MetricsStore> metrics);
  ~PlanBook();

  // The next batch of a domain. `alone`: its process set has one rank, and nothing to plan.
  OpenBatchPtr Open(const DomainSpecPtr& listed, bool alone);
  // Calls `post`, which tells the control loop that this rank joins, when no batch that was opened
  // before is held. `Joined` follows when the join has ended. False, and no call, during another.
  bool Join(std::function<void()> post);
  void Joined() { joining_ = false; }
  // A process set has been removed, on all ranks: what is held of it fails, and its domains are
  // forgotten.
  void Drop(int process_set, const Status& status);
  // The engine ends: what is held fails.
  void Close(const Status& status);

  // Of each domain's last list, in the order of the domains' first batches.
  std::vector<PlanReport> Reports() const;
  // The spec that a batch would have now, or null.
  DomainSpecPtr Current(int process_set, const std::string& domain) const;

 private:
  struct Listing;  // one list of a domain
  struct Domain;
  using DomainPtr = std::shared_ptr<Domain>;
  // Who waits for the outcome of a batch that decides. `listing` is good in the same epoch.
  struct Decider {
    DomainPtr domain;
    Listing* listing;
    int64_t epoch;
    DomainSpecPtr listed;
  };
  // A batch on its way out of the lock: submissions are made without it.
  struct Opened {
    OpenBatchPtr batch;
    OpenBatch::Kept kept;
    std::vector<Submission> own;
  };
  DomainPtr Find(const DomainSpecPtr& listed, bool wishes, bool alone);
  Listing* ListingOf(Domain* domain, const DomainSpecPtr& listed);
  void OpenNow(const DomainPtr& domain, const OpenBatchPtr& batch, std::vector<Opened>* opened);
  std::vector<Submission> OwnSubmissions(const Decider& decider, const Form& form);
  void Submit(std::vector<Opened> opened);
  // The outcome of a batch that decides.
  void Compared(const Decider& decider, const Status& status, const std::vector<int64_t>& maxima);
  void Probed(const Decider& decider, const Status& status);
  void Exchanged(const Decider& decider, const Status& status, const std::vector<int64_t>& maxima);
  bool Stale(const Decider& decider) const;
  void MakePlan(const Decider& decider, Measured measured, const std::vector<int64_t>& sizes,
                Trials trials, const ArrangementPtr& current);
  void Decided(const DomainPtr& domain, std::vector<Opened>* opened);
  // The next batch of this list waits for an outcome, or for a plan that is being made.
  bool MustHold(Domain* domain, const DomainSpecPtr& listed);
  void OpenHeld(const DomainPtr& domain, std::vector<Opened>* opened);
  std::vector<Opened> FailHeld(Domain* domain, const Status& status);
  void SubmitFailed(std::vector<Opened> failed);
  void JoinIfFree();

  BatchRunner* const runner_;
  bool closed_ = false;
  const PlanOptions options_;
  const std::shared_ptr<MetricsStore> metrics_;
  mutable std::mutex mutex_;
  std::atomic<uint64_t> known_{0};  // a bit of each domain's name
  std::map<std::pair<int, std::string>, DomainPtr> domains_;
  std::vector<std::pair<int, std::string>> names_;
  std::function<void()> join_;  // waits for held batches
  std::atomic<bool> joining_{false};
  Background planner_{"planner"};  // last: its task uses the others
};

}  // namespace gradred::engine
