#include "engine/plan_book.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"

namespace gradred::engine {
namespace {

constexpr int kWarmUp = 2;
constexpr int64_t kNone = -1;
constexpr size_t kMostForms = 4;

}  // namespace

struct PlanBook::Domain {
  // Known to all ranks alike, between a batch that decides and the next.
  int64_t epoch = 0;   // joins that ended
  int64_t number = 0;  // of the next batch
  int64_t compare_at = 0, probe_at = kNone, exchange_at = kNone;
  bool planned = false;      // by all ranks
  ArrangementPtr current;    // of the last batch that was opened
  std::vector<Nanos> costs;  // as exchanged
  Trials trials;
  int wait = 0;  // batches from the comparison to the next exchange

  // This rank's.
  bool wishes_plan = false;
  bool first = true;        // what is proposed comes from the graph
  ArrangementPtr proposed;  // to be compared
  core::Cuts proposed_times;
  bool deciding = false;
  std::deque<OpenBatchPtr> held;
  std::shared_ptr<TimesStore> times;
  std::deque<std::pair<DomainSpecPtr, FormPtr>> forms;  // the last ones, by listed spec
  DomainSpecPtr listed;                                 // of the last batch
  int64_t changes = 0;
  core::Cuts predicted;
  Measured measured;  // as exchanged
};

PlanBook::PlanBook(BatchRunner* runner, PlanOptions options, std::shared_ptr<MetricsStore> metrics)
    : runner_(runner), options_(options), metrics_(std::move(metrics)) {}

PlanBook::~PlanBook() = default;

OpenBatchPtr PlanBook::Open(const DomainSpecPtr& listed, bool alone) {
  auto batch = std::make_shared<OpenBatch>(listed);
  const bool wishes_plan = listed->planned && !alone;
  const bool wishes = listed->proposal || wishes_plan;
  std::vector<Opened> opened;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    Domain* domain = nullptr;
    if (wishes || any_.load(std::memory_order_acquire)) {
      lock.lock();
      if (!runner_) throw Error(Kind::kNotInitialized, "the engine has been shut down");
      const std::pair<int, std::string> key(listed->process_set, listed->name);
      const auto at = domains_.find(key);
      if (at != domains_.end()) {
        domain = at->second.get();
      } else if (wishes) {
        domain = (domains_[key] = std::make_unique<Domain>()).get();
        domain->current = listed->Listed();
        domain->times = std::make_shared<TimesStore>(options_.batches);
        domain->times->Restart(domain->current, kWarmUp);
        domain->wishes_plan = wishes_plan;
        names_.push_back(key);
        any_.store(true, std::memory_order_release);
      }
    }
    if (!domain) {
      if (lock.owns_lock()) lock.unlock();
      const BatchPtr run = runner_->Make(listed);
      batch->SetOpen(run, nullptr, nullptr);
      runner_->Start(run);
      return batch;
    }
    if (domain->deciding || !domain->held.empty()) {
      domain->held.push_back(batch);
      return batch;
    }
    OpenNow(domain, batch, &opened);
  }
  Submit(std::move(opened));
  return batch;
}

void PlanBook::OpenNow(Domain* domain, const OpenBatchPtr& batch, std::vector<Opened>* opened) {
  const DomainSpecPtr& listed = batch->listed();
  const int64_t number = domain->number++;
  Purpose purpose = Purpose::kPlain;
  if (number == domain->compare_at)
    purpose = Purpose::kCompare;
  else if (number == domain->probe_at)
    purpose = Purpose::kProbe;
  else if (number == domain->exchange_at)
    purpose = Purpose::kExchange;
  domain->listed = listed;
  if (purpose == Purpose::kCompare && domain->first)
    domain->proposed = listed->proposal ? listed->proposal : listed->Listed();
  domain->deciding = purpose == Purpose::kCompare || purpose == Purpose::kExchange;

  const FormPtr form = FormOf(domain, listed, purpose);
  const BatchPtr run = runner_->Make(form->spec);
  std::shared_ptr<BatchTimes> times;
  if (domain->wishes_plan)
    run->times = times = std::make_shared<BatchTimes>(domain->times, form, number);
  Opened result;
  result.own = OwnSubmissions(domain, *form, listed);
  result.kept = batch->SetOpen(run, form, std::move(times));
  result.batch = batch;
  runner_->Start(run);
  opened->push_back(std::move(result));
}

FormPtr PlanBook::FormOf(Domain* domain, const DomainSpecPtr& listed, Purpose purpose) {
  for (const auto& [spec, form] : domain->forms)
    if (spec == listed && form->purpose == purpose &&
        (form->arrangement == domain->current ||
         form->arrangement->order.size() != domain->current->order.size()))
      return form;
  FormPtr form = MakeForm(listed, purpose, domain->current);
  domain->forms.emplace_front(listed, form);
  if (domain->forms.size() > kMostForms) domain->forms.pop_back();
  return form;
}

std::vector<Submission> PlanBook::OwnSubmissions(Domain* domain, const Form& form,
                                                 const DomainSpecPtr& listed) {
  std::vector<Submission> own(form.extra);
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
    return own;
  }
  if (form.extra == 0) return own;
  auto values = std::make_shared<std::vector<int64_t>>();
  const auto self = shared_from_this();
  const int64_t epoch = domain->epoch;
  if (form.purpose == Purpose::kCompare) {
    const int64_t digest = domain->proposed->Digest();
    *values = {digest, -digest, !domain->wishes_plan};
    own[0].done = [self, domain, epoch, values](const Result& result) {
      self->Compared(domain, epoch, result.status, *values);
    };
  } else {
    *values = domain->times
                  ->Read(static_cast<int>(listed->entries.size()), ProbeSizes(*listed),
                         domain->costs, options_.cores)
                  .Encode();
    own[0].done = [self, domain, epoch, values, listed](const Result& result) {
      self->Exchanged(domain, epoch, result.status, *values, listed);
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

void PlanBook::Compared(Domain* domain, int64_t epoch, const Status& status,
                        const std::vector<int64_t>& maxima) {
  std::vector<Opened> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!runner_ || epoch != domain->epoch) return;
    if (!status.ok()) {
      domain->compare_at = domain->number;
    } else {
      domain->compare_at = kNone;
      const bool equal = maxima[0] == -maxima[1];
      if (equal && domain->proposed->Digest() != domain->current->Digest()) {
        domain->current = domain->proposed;
        domain->times->Restart(domain->current, kWarmUp);
        if (!domain->first) {
          ++domain->changes;
          metrics_->Update([](Metrics& m) { ++m.plan_changes; });
        }
      } else if (!equal && !domain->first) {
        Log(LogLevel::kWarning, "the ranks made different plans for '" + domain->listed->name +
                                    "' of the same measurements: the old one stays");
      }
      if (equal) domain->predicted = domain->proposed_times;
      if (domain->first) {
        domain->first = false;
        domain->planned = maxima[2] == 0;
        domain->probe_at = domain->planned ? domain->number : kNone;
        domain->wait = 1;
      }
      if (domain->planned)
        domain->exchange_at = domain->number + domain->wait + kWarmUp + options_.batches;
    }
    Decided(domain, &opened);
  }
  Submit(std::move(opened));
}

void PlanBook::Exchanged(Domain* domain, int64_t epoch, const Status& status,
                         const std::vector<int64_t>& maxima, const DomainSpecPtr& listed) {
  const std::vector<int64_t> sizes = ProbeSizes(*listed);
  std::optional<Measured> measured;
  if (status.ok()) measured = Measured::Decode(maxima, static_cast<int>(sizes.size()));
  Trials::Next next;
  const bool enough = measured && !measured->lacking && !measured->unprobed;
  if (enough) {
    // Without the lock: no batch is opened before this has decided.
    std::vector<int64_t> nbytes;
    for (const EntrySpec& entry : listed->entries) nbytes.push_back(WireNbytes(entry));
    ArrangementPtr current;
    Trials trials;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      current = domain->current;
      trials = domain->trials;
    }
    if (current->order.size() != nbytes.size()) current = listed->Listed();
    next = trials.OnMeasured(*measured, current, nbytes, sizes, options_.spare_core);
    std::lock_guard<std::mutex> lock(mutex_);
    if (epoch == domain->epoch) domain->trials = std::move(trials);
  }
  std::vector<Opened> opened;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!runner_ || epoch != domain->epoch) return;
    domain->exchange_at = kNone;
    if (!measured) {
      domain->exchange_at = domain->number;
    } else if (measured->unprobed) {
      domain->probe_at = domain->number;
      domain->exchange_at = domain->number + 1 + options_.batches;
    } else if (measured->lacking) {
      domain->exchange_at = domain->number + options_.batches;
    } else {
      domain->costs = measured->costs;
      domain->measured = std::move(*measured);
      domain->proposed = next.arrangement;
      domain->proposed_times = std::move(next.predicted);
      domain->compare_at = domain->number;
      domain->wait = next.rest;
    }
    Decided(domain, &opened);
  }
  Submit(std::move(opened));
}

void PlanBook::Decided(Domain* domain, std::vector<Opened>* opened) {
  domain->deciding = false;
  while (!domain->held.empty() && !domain->deciding) {
    const OpenBatchPtr batch = std::move(domain->held.front());
    domain->held.pop_front();
    OpenNow(domain, batch, opened);
  }
  JoinIfFree();
}

void PlanBook::Join(std::function<void()> post) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (joining_.exchange(true))
    throw Error(Kind::kInvalidArgument, "another thread of this rank waits in join");
  join_ = std::move(post);
  JoinIfFree();
}

// With the lock: a batch is opened before or after the join in the book and in the control loop
// alike.
void PlanBook::JoinIfFree() {
  if (!join_) return;
  for (const auto& [key, domain] : domains_)
    if (key.first == 0 && !domain->held.empty()) return;
  for (const auto& [key, domain] : domains_)
    if (key.first == 0) Reset(domain.get());
  std::exchange(join_, nullptr)();
}

void PlanBook::Reset(Domain* domain) {
  ++domain->epoch;
  domain->number = 0;
  domain->compare_at = 0;
  domain->probe_at = domain->exchange_at = kNone;
  domain->planned = false;
  domain->current = domain->listed->Listed();
  domain->costs.clear();
  domain->trials = Trials();
  domain->first = true;
  domain->proposed_times = domain->predicted = core::Cuts();
  domain->deciding = false;
  domain->times->Restart(domain->current, 0);
}

void PlanBook::Close(const Status& status) {
  std::vector<Opened> opened;
  BatchRunner* runner;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    runner = std::exchange(runner_, nullptr);
    if (!runner) return;
    for (const auto& [key, domain] : domains_) {
      for (const OpenBatchPtr& batch : domain->held) {
        const BatchPtr run = runner->Make(batch->listed());
        run->FailRest(status);
        opened.push_back({batch, batch->SetOpen(run, nullptr, nullptr), {}});
      }
      domain->held.clear();
    }
  }
  for (Opened& one : opened)
    for (auto& [position, submission] : one.kept.submissions)
      one.batch->batch()->Submit(position, std::move(submission));
}

PlanReport PlanBook::Report(int process_set, const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = domains_.find({process_set, name});
  if (at == domains_.end() || !at->second->listed)
    throw Error(Kind::kInvalidArgument, "no batch of a planned domain '" + name + "' has begun");
  const Domain& domain = *at->second;
  PlanReport report;
  report.domain = name;
  report.process_set = process_set;
  report.planned = domain.planned;
  for (const EntrySpec& entry : domain.listed->entries) {
    report.labels.push_back(entry.label);
    report.nbytes.push_back(WireNbytes(entry));
  }
  report.arrangement = domain.current->order.size() == domain.listed->entries.size()
                           ? domain.current
                           : domain.listed->Listed();
  report.batches = domain.number;
  report.changes = domain.changes;
  report.ready = domain.measured.ready;
  report.predicted = domain.predicted;
  report.measured = domain.times->Groups();
  if (!domain.costs.empty()) report.sizes = ProbeSizes(*domain.listed);
  report.costs = domain.costs;
  report.round = domain.measured.round;
  return report;
}

std::vector<std::pair<int, std::string>> PlanBook::Domains() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return names_;
}

DomainSpecPtr PlanBook::Current(int process_set, const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = domains_.find({process_set, name});
  if (at == domains_.end() || !at->second->listed) return nullptr;
  return MakeForm(at->second->listed, Purpose::kPlain, at->second->current)->spec;
}

}  // namespace gradred::engine
