#include "engine/plan_book.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"

namespace gradred::engine {
namespace {

constexpr int kWarmUp = 2;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr size_t kMostRecent = 4;
constexpr int kMostLacks = 9;
// Batches between an exchange and the comparison of what each rank has made of it: plans are made
// beside them, and a batch that comes to the comparison earlier is held.
constexpr int kPlanning = 2;

}  // namespace

struct PlanBook::Listing {
  // Known to all ranks alike, between a batch that decides and the next: what is due at which
  // number of a batch, or later.
  int64_t compare_at = kNever, probe_at = kNever, exchange_at = kNever;
  bool planned = false;      // by all ranks
  bool planning = false;     // `proposed` is being made
  ArrangementPtr current;    // of the last batch that was opened
  std::vector<Nanos> costs;  // as exchanged
  Trials trials;
  int wait = 0;   // batches from the comparison to the next exchange
  int lacks = 0;  // exchanges in a row without enough measurements

  // This rank's.
  bool wishes_plan = false;
  bool first = true;        // what is proposed comes from the graph
  ArrangementPtr proposed;  // to be compared
  core::Cuts proposed_times;
  std::shared_ptr<TimesStore> times;
  std::deque<std::pair<DomainSpecPtr, FormPtr>> forms;  // the last ones, by listed spec
  int64_t changes = 0;
  core::Cuts predicted;
  Measured measured;  // as exchanged
};

struct PlanBook::Domain {
  bool alone = false;  // its process set has one rank
  int64_t epoch = 0;   // joins
  int64_t number = 0;  // of the next batch
  bool deciding = false;
  std::deque<OpenBatchPtr> held;
  std::map<std::string, std::unique_ptr<Listing>> listings;
  std::deque<std::pair<DomainSpecPtr, Listing*>> recent;  // the last one first
  std::shared_ptr<LastBatch> last = std::make_shared<LastBatch>();
};

namespace {

// What must be equal for two specs to be the same list.
std::string KeyOf(const DomainSpec& spec) {
  Writer out;
  out.Put<uint8_t>(spec.planned);
  for (const int end : spec.group_ends) out.Put<int32_t>(end);
  for (const EntrySpec& entry : spec.entries) {
    out.Put(entry.op);
    out.Put(entry.reduce_op);
    out.Put(entry.dtype);
    out.Put(entry.wire);
    out.Put<uint32_t>(entry.shape.size());
    if (!spec.varies)
      for (const int64_t d : entry.shape) out.Put<int64_t>(d);
  }
  return out.Take();
}

// One of 64: of domains that are not planned, most need not look further.
uint64_t BitOf(const DomainSpec& spec) {
  return uint64_t{1} << (std::hash<std::string>()(spec.name) + spec.process_set) % 64;
}

template <class T>
void PushRecent(std::deque<T>* recent, T value) {
  recent->push_front(std::move(value));
  if (recent->size() > kMostRecent) recent->pop_back();
}

}  // namespace

PlanBook::PlanBook(BatchRunner* runner, PlanOptions options, std::shared_ptr<MetricsStore> metrics)
    : runner_(runner), options_(options), metrics_(std::move(metrics)) {}

PlanBook::~PlanBook() = default;

PlanBook::DomainPtr PlanBook::Find(const DomainSpecPtr& listed, bool wishes, bool alone) {
  const std::pair<int, std::string> key(listed->process_set, listed->name);
  const auto at = domains_.find(key);
  if (at != domains_.end()) return at->second;
  if (!wishes) return nullptr;
  names_.push_back(key);
  known_.fetch_or(BitOf(*listed), std::memory_order_acq_rel);
  const DomainPtr domain = domains_[key] = std::make_shared<Domain>();
  domain->alone = alone;
  return domain;
}

PlanBook::Listing* PlanBook::ListingOf(Domain* domain, const DomainSpecPtr& listed) {
  for (auto at = domain->recent.begin(); at != domain->recent.end(); ++at) {
    if (at->first != listed) continue;
    std::rotate(domain->recent.begin(), at, at + 1);
    return domain->recent.front().second;
  }
  std::unique_ptr<Listing>& listing = domain->listings[KeyOf(*listed)];
  if (!listing) {
    listing = std::make_unique<Listing>();
    listing->current = listed->Listed();
    listing->times = std::make_shared<TimesStore>(options_.batches, domain->last);
    listing->times->Restart(listing->current, kWarmUp);
    listing->wishes_plan = listed->planned && !domain->alone;
    if (listing->wishes_plan || listed->proposal) listing->compare_at = 0;
  }
  PushRecent(&domain->recent, {listed, listing.get()});
  return listing.get();
}

OpenBatchPtr PlanBook::Open(const DomainSpecPtr& listed, bool alone) {
  auto batch = std::make_shared<OpenBatch>(listed);
  const bool wishes = listed->proposal || listed->planned;
  std::vector<Opened> opened;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    DomainPtr domain;
    if (wishes || (known_.load(std::memory_order_acquire) & BitOf(*listed)) != 0) {
      lock.lock();
      if (closed_) throw Error(Kind::kNotInitialized, "the engine has been shut down");
      domain = Find(listed, wishes, alone);
    }
    if (!domain) {
      if (lock.owns_lock()) lock.unlock();
      const BatchPtr run = runner_->Make(listed);
      batch->SetOpen(run, nullptr, nullptr);
      runner_->Start(run);
      return batch;
    }
    if (!domain->held.empty() || MustHold(domain.get(), listed)) {
      domain->held.push_back(batch);
      return batch;
    }
    OpenNow(domain, batch, &opened);
  }
  Submit(std::move(opened));
  return batch;
}

bool PlanBook::MustHold(Domain* domain, const DomainSpecPtr& listed) {
  if (domain->deciding) return true;
  const Listing* listing = ListingOf(domain, listed);
  return listing->planning && domain->number >= listing->compare_at;
}

void PlanBook::OpenNow(const DomainPtr& domain, const OpenBatchPtr& batch,
                       std::vector<Opened>* opened) {
  const DomainSpecPtr& listed = batch->listed();
  Listing* listing = ListingOf(domain.get(), listed);
  const int64_t number = domain->number++;
  Purpose purpose = Purpose::kPlain;
  if (number >= listing->compare_at)
    purpose = Purpose::kCompare;
  else if (number >= listing->probe_at)
    purpose = Purpose::kProbe;
  else if (number >= listing->exchange_at)
    purpose = Purpose::kExchange;
  if (purpose == Purpose::kCompare && listing->first)
    listing->proposed = listed->proposal ? listed->proposal : listed->Listed();
  domain->deciding = purpose != Purpose::kPlain;

  FormPtr form;
  for (const auto& [spec, known] : listing->forms)
    if (spec == listed && known->purpose == purpose && known->arrangement == listing->current)
      form = known;
  if (!form) {
    form = MakeForm(listed, purpose, listing->current);
    PushRecent(&listing->forms, {listed, form});
  }
  const BatchPtr run = runner_->Make(form->spec);
  run->times = std::make_shared<BatchTimes>(listing->times, form, number);
  Opened result;
  result.own = OwnSubmissions({domain, listing, domain->epoch, listed}, *form);
  result.kept = batch->SetOpen(run, form, run->times);
  result.batch = batch;
  runner_->Start(run);
  opened->push_back(std::move(result));
}

std::vector<Submission> PlanBook::OwnSubmissions(const Decider& decider, const Form& form) {
  std::vector<Submission> own(form.extra);
  if (form.extra == 0) return own;
  const auto self = shared_from_this();
  if (form.purpose == Purpose::kProbe) {
    // One tensor for all: what is in it does not matter.
    size_t nbytes = 0;
    for (int i = 0; i < form.extra; ++i) {
      const EntrySpec& entry = form.spec->entries[i];
      nbytes = std::max<size_t>(nbytes, entry.count() * DTypeSize(entry.dtype));
    }
    auto memory = std::make_shared<std::vector<char>>(nbytes);
    for (Submission& submission : own) {
      submission.input = submission.output = memory->data();
      submission.done = [memory](const Result&) {};
    }
    own.back().done = [self, decider, memory](const Result& result) {
      self->Probed(decider, result.status);
    };
    return own;
  }
  const Listing& listing = *decider.listing;
  auto values = std::make_shared<std::vector<int64_t>>();
  if (form.purpose == Purpose::kCompare) {
    const int64_t digest = listing.proposed->Digest();
    *values = {digest, -digest, !listing.wishes_plan};
    own[0].done = [self, decider, values](const Result& result) {
      self->Compared(decider, result.status, *values);
    };
  } else {
    *values = listing.times
                  ->Read(static_cast<int>(form.place_of.size()), ProbeSizes(*decider.listed),
                         listing.costs, options_.cores)
                  .Encode();
    own[0].done = [self, decider, values](const Result& result) {
      self->Exchanged(decider, result.status, *values);
    };
  }
  own[0].input = own[0].output = values->data();
  return own;
}

void PlanBook::Submit(std::vector<Opened> opened) {
  for (Opened& one : opened) {
    const BatchPtr& run = one.batch->batch();
    for (size_t i = 0; i < one.own.size(); ++i)
      runner_->Submit(run, static_cast<int>(i), std::move(one.own[i]));
    for (auto& [position, submission] : one.kept.submissions) {
      one.batch->NoteSubmitted(position);
      runner_->Submit(run, one.batch->PlaceOf(position), std::move(submission));
    }
    if (one.kept.abandoned) runner_->Abandon(run, *one.kept.abandoned);
  }
}

bool PlanBook::Stale(const Decider& decider) const {
  return closed_ || decider.epoch != decider.domain->epoch;
}

void PlanBook::Compared(const Decider& decider, const Status& status,
                        const std::vector<int64_t>& maxima) {
  std::vector<Opened> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Stale(decider)) return;
    Listing* listing = decider.listing;
    const int64_t next = decider.domain->number;
    if (status.ok()) {
      listing->compare_at = kNever;
      const bool equal = maxima[0] == -maxima[1];
      if (equal && listing->proposed->Digest() != listing->current->Digest()) {
        listing->current = listing->proposed;
        listing->times->Restart(listing->current, kWarmUp);
        if (!listing->first) {
          ++listing->changes;
          metrics_->Update([](Metrics& m) { ++m.plan_changes; });
        }
      } else if (!equal && !listing->first) {
        Log(LogLevel::kWarning, "the ranks made different plans for '" + decider.listed->name +
                                    "' of the same measurements: the old one stays");
      }
      if (equal) listing->predicted = listing->proposed_times;
      if (listing->first) {
        listing->first = false;
        listing->planned = maxima[2] == 0;
        listing->wait = 1;
        if (listing->planned) listing->probe_at = next;
      }
      if (listing->planned)
        listing->exchange_at = next + listing->wait + kWarmUp + options_.batches;
    }
    Decided(decider.domain, &opened);
  }
  Submit(std::move(opened));
}

void PlanBook::Probed(const Decider& decider, const Status& status) {
  std::vector<Opened> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Stale(decider)) return;
    if (status.ok()) decider.listing->probe_at = kNever;
    Decided(decider.domain, &opened);
  }
  Submit(std::move(opened));
}

void PlanBook::Exchanged(const Decider& decider, const Status& status,
                         const std::vector<int64_t>& maxima) {
  const std::vector<int64_t> sizes = ProbeSizes(*decider.listed);
  Measured measured;
  if (status.ok()) measured = Measured::Decode(maxima, static_cast<int>(sizes.size()));
  const bool enough = status.ok() && !measured.lacking && !measured.unprobed;
  std::vector<Opened> opened;
  std::unique_lock<std::mutex> lock(mutex_);
  if (Stale(decider)) return;
  Listing* listing = decider.listing;
  const int64_t next = decider.domain->number;
  if (enough) {
    listing->compare_at = next + kPlanning;
    listing->exchange_at = kNever;
    listing->lacks = 0;
    listing->planning = true;
    planner_.Post([this, decider, measured = std::move(measured), sizes, trials = listing->trials,
                   current = listing->current]() mutable {
      MakePlan(decider, std::move(measured), sizes, std::move(trials), current);
    });
  } else if (status.ok()) {
    if (measured.unprobed) listing->probe_at = next;
    listing->exchange_at = next + 1 + (static_cast<int64_t>(options_.batches) << listing->lacks);
    listing->lacks = std::min(listing->lacks + 1, kMostLacks);
  }
  Decided(decider.domain, &opened);
  lock.unlock();
  Submit(std::move(opened));
}

// It may take a quarter of a second, so it has a thread of its own.
void PlanBook::MakePlan(const Decider& decider, Measured measured,
                        const std::vector<int64_t>& sizes, Trials trials,
                        const ArrangementPtr& current) {
  std::vector<int64_t> nbytes;
  for (const EntrySpec& entry : decider.listed->entries) nbytes.push_back(WireNbytes(entry));
  Trials::Next next = trials.OnMeasured(measured, current, nbytes, sizes, options_.spare_core);
  std::vector<Opened> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Stale(decider)) return;
    Listing* listing = decider.listing;
    listing->trials = std::move(trials);
    listing->costs = measured.costs;
    listing->measured = std::move(measured);
    listing->proposed = std::move(next.arrangement);
    listing->proposed_times = std::move(next.predicted);
    listing->wait = next.rest;
    listing->planning = false;
    OpenHeld(decider.domain, &opened);
  }
  Submit(std::move(opened));
}

void PlanBook::Decided(const DomainPtr& domain, std::vector<Opened>* opened) {
  domain->deciding = false;
  OpenHeld(domain, opened);
}

void PlanBook::OpenHeld(const DomainPtr& domain, std::vector<Opened>* opened) {
  while (!domain->held.empty() && !MustHold(domain.get(), domain->held.front()->listed())) {
    const OpenBatchPtr batch = std::move(domain->held.front());
    domain->held.pop_front();
    OpenNow(domain, batch, opened);
  }
  JoinIfFree();
}

bool PlanBook::Join(std::function<void()> post) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (joining_.exchange(true)) return false;
  join_ = std::move(post);
  JoinIfFree();
  return true;
}

// With the lock: a batch is opened before or after the join in the book and in the control loop
// alike.
void PlanBook::JoinIfFree() {
  if (!join_) return;
  for (const auto& [key, domain] : domains_)
    if (key.first == 0 && !domain->held.empty()) return;
  for (const auto& [key, domain] : domains_) {
    if (key.first != 0) continue;
    ++domain->epoch;
    domain->number = 0;
    domain->deciding = false;
    domain->recent.clear();
    domain->listings.clear();
  }
  std::exchange(join_, nullptr)();
}

std::vector<PlanBook::Opened> PlanBook::FailHeld(Domain* domain, const Status& status) {
  std::vector<Opened> failed;
  for (const OpenBatchPtr& batch : domain->held) {
    const BatchPtr run = runner_->Make(batch->listed());
    run->FailRest(status);
    failed.push_back({batch, batch->SetOpen(run, nullptr, nullptr), {}});
  }
  domain->held.clear();
  return failed;
}

void PlanBook::SubmitFailed(std::vector<Opened> failed) {
  for (Opened& one : failed)
    for (auto& [position, submission] : one.kept.submissions)
      one.batch->batch()->Submit(position, std::move(submission));
}

void PlanBook::Drop(int process_set, const Status& status) {
  std::vector<Opened> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = domains_.begin(); at != domains_.end();) {
      if (at->first.first != process_set) {
        ++at;
        continue;
      }
      ++at->second->epoch;
      for (Opened& one : FailHeld(at->second.get(), status)) failed.push_back(std::move(one));
      names_.erase(std::find(names_.begin(), names_.end(), at->first));
      at = domains_.erase(at);
    }
  }
  SubmitFailed(std::move(failed));
}

void PlanBook::Close(const Status& status) {
  std::vector<Opened> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true)) return;
    for (const auto& [key, domain] : domains_)
      for (Opened& one : FailHeld(domain.get(), status)) failed.push_back(std::move(one));
  }
  SubmitFailed(std::move(failed));
  planner_.Stop();
}

std::vector<PlanReport> PlanBook::Reports() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PlanReport> reports;
  for (const auto& name : names_) {
    const Domain& domain = *domains_.at(name);
    if (domain.recent.empty()) continue;  // after a join
    const auto& [listed, listing] = domain.recent.front();
    PlanReport report;
    report.process_set = name.first;
    report.domain = name.second;
    report.planned = listing->planned;
    for (const EntrySpec& entry : listed->entries) {
      report.labels.push_back(entry.label);
      report.counts.push_back(entry.count());
      report.nbytes.push_back(WireNbytes(entry));
    }
    report.arrangement = listing->current;
    report.batches = domain.number;
    report.changes = listing->changes;
    report.ready = listing->measured.ready;
    report.predicted = listing->predicted;
    report.measured = listing->times->Groups();
    if (!listing->costs.empty()) report.sizes = ProbeSizes(*listed);
    report.costs = listing->costs;
    report.round = listing->measured.round;
    reports.push_back(std::move(report));
  }
  return reports;
}

DomainSpecPtr PlanBook::Current(int process_set, const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = domains_.find({process_set, name});
  if (at == domains_.end() || at->second->recent.empty()) return nullptr;
  const auto& [listed, listing] = at->second->recent.front();
  return MakeForm(listed, Purpose::kPlain, listing->current)->spec;
}

}  // namespace gradred::engine
