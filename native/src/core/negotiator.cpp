#include "core/negotiator.h"

#include <algorithm>

#include "core/declaration.h"
#include "core/negotiator_impl.h"

namespace gradred::core {

Negotiator::Negotiator(NegotiatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
Negotiator::~Negotiator() = default;

void Negotiator::Step(const Event& event, Nanos now, std::vector<Action>* actions) {
  impl_->Step(event, now, actions);
}
Nanos Negotiator::NextWake() const { return impl_->NextWake(); }
std::vector<Negotiator::Pending> Negotiator::PendingBatches() const {
  return impl_->PendingBatches();
}
bool Negotiator::Lacks(const std::string& domain, int group) const {
  return impl_->Lacks(domain, group);
}
const NegotiatorCounters& Negotiator::counters() const { return impl_->counters(); }
uint64_t Negotiator::TableDigest() const { return impl_->TableDigest(); }

std::string Negotiator::Merge(const std::string& a, const std::string& b) {
  Records records = Records::Decode(a);
  records.MergeFrom(Records::Decode(b));
  return records.Encode();
}

Negotiator::Impl::Impl(NegotiatorOptions options)
    : options_(std::move(options)), fallback_(options_.fallback_first) {}

void Negotiator::Impl::Step(const Event& event, Nanos now, std::vector<Action>* actions) {
  now_ = now;
  actions_ = actions;
  std::visit([this](const auto& e) { On(e); }, event);
  if (MustEnter()) EnterRound();
  counters_.domains = table_.domains();
  counters_.ids = table_.ids();
}

// --- Events
// -----------------------------------------------------------------------------------------------------------------

void Negotiator::Impl::On(const Begin& event) {
  const DeclarationPtr& declaration = event.declaration;
  const std::string& name = declaration->name;
  if (shutdown_requested_) Refuse("Begin of '" + name + "' after Shutdown");
  if (join_requested_) Refuse("Begin of '" + name + "' after Join");
  if (batches_.count(name)) Refuse("Begin of '" + name + "', whose batch has not ended");
  Domain* domain = table_.Find(name);
  const bool known = domain && domain->last_begun == declaration;
  if (!known) CheckDeclaration(*declaration);

  if (const auto owed = owed_.find(name); owed != owed_.end()) {
    actions_->push_back(Fail{name, owed->second.front()});
    owed->second.erase(owed->second.begin());
    if (owed->second.empty()) owed_.erase(owed);
    return;
  }
  if (const ShutDownRank* who = WhoPrevents(name)) {
    actions_->push_back(Fail{name, ShutDownStatus(*who)});
    return;
  }
  Batch& batch = batches_[name];
  batch.declaration = declaration;
  batch.ready.assign(declaration->group_ends.size(), 0);
  if (known || (domain && SameSignature(*domain->text, *declaration)))
    Bind(&batch, domain);
  else
    undeclared_.insert(name);
}

void Negotiator::Impl::On(const Ready& event) {
  const auto found = batches_.find(event.domain);
  if (shutdown_requested_) Refuse("Ready of '" + event.domain + "' after Shutdown");
  if (found == batches_.end()) Refuse("Ready of '" + event.domain + "', which has no batch");
  Batch& batch = found->second;
  if (batch.abandoned) Refuse("Ready of '" + event.domain + "' after Abandon");
  const size_t group = static_cast<size_t>(event.group);
  if (group >= batch.ready.size() || batch.ready[group])
    Refuse("Ready of group " + std::to_string(event.group) + " of '" + event.domain +
           "', which is unknown or was ready before");
  batch.ready[group] = 1;
  ++batch.ready_count;
  if (batch.domain) held_.Set(batch.domain->ids[group]);
}

void Negotiator::Impl::On(const Abandon& event) {
  const auto found = batches_.find(event.domain);
  if (shutdown_requested_) Refuse("Abandon of '" + event.domain + "' after Shutdown");
  if (found == batches_.end()) Refuse("Abandon of '" + event.domain + "', which has no batch");
  Batch& batch = found->second;
  if (batch.abandoned) return;  // the first reason stays
  batch.abandoned = true;
  batch.reason = event.reason;
  batch.abandoned_kind = event.kind;
  if (batch.domain) {
    for (const int id : batch.domain->ids) held_.Clear(id);
  }
  undeclared_.erase(event.domain);
  abandoned_.insert(event.domain);
}

void Negotiator::Impl::On(const Join&) {
  if (shutdown_requested_) Refuse("Join after Shutdown");
  if (join_requested_) Refuse("a second Join");
  join_requested_ = true;
  owed_.clear();  // everybody's next batch is a common one after AllJoined
}

void Negotiator::Impl::On(const Shutdown& event) {
  if (shutdown_requested_) Refuse("a second Shutdown");
  shutdown_requested_ = true;
  shutdown_reason_ = event.reason;
  for (const auto& [name, batch] : batches_) {
    if (Offers(batch)) continue;
    undeclared_.erase(name);
    if (!batch.domain) continue;
    for (const int id : batch.domain->ids) held_.Clear(id);
  }
}

// --- Entering a round
// -------------------------------------------------------------------------------------------------------

// See Note [Orchestration]. A rank that has joined or shut down has no work that would make it
// enter, and the others need it: it enters at once and waits in the round. That does not spin: a
// round needs all ranks, and when all have joined or shut down, each round ends a batch or the
// join.
bool Negotiator::Impl::MustEnter() {
  if (phase_ != Phase::kIdle) return false;
  if (join_requested_ && !joined_) {
    joined_ = std::all_of(batches_.begin(), batches_.end(), [](const auto& entry) {
      return entry.second.whole() && !entry.second.abandoned;
    });
  }
  if (joined_ || shutdown_requested_) return true;
  if (!undeclared_.empty() || !abandoned_.empty()) return true;  // rule 3
  if (!held_.Any()) {
    fallback_at_ = kForever;
    return false;
  }
  if (awaited_ < 0 || held_.Test(awaited_)) return true;  // rules 1 and 2
  if (!options_.timer) return false;
  if (fallback_at_ == kForever) fallback_at_ = now_ + fallback_;
  if (now_ < fallback_at_) return false;
  ++counters_.fallbacks;  // rule 4
  fallback_ = std::min(fallback_ + fallback_ / 2, options_.fallback_cap);
  return true;
}

void Negotiator::Impl::EnterRound() {
  fallback_at_ = kForever;
  proposed_ = Proposals();
  const bool brings_join = joined_ && !join_announced_;
  const bool brings_shutdown = shutdown_requested_ && !shutdown_announced_;
  RoundStatus status;
  status.joined = offered_all_ = joined_ && !shutdown_requested_;
  status.has_records = brings_join || brings_shutdown || !abandoned_.empty();
  status.shut_down_idle = shutdown_requested_ && !OffersAny();
  status.join_idle = status.shut_down_idle || (joined_ && batches_.empty());
  status.check = static_cast<uint32_t>(table_.digest());
  status.declares = !proposed_.empty();
  if (status.declares) {
    Writer list;
    for (const Proposal& proposal : proposed_) {
      list.Put(proposal.name_digest.hi);
      list.Put(proposal.name_digest.lo);
      list.Put(proposal.signature.hi);
      list.Put(proposal.signature.lo);
    }
    status.declared = DigestOf(list.Take(), options_.key);
    if (status.declared == Digest()) status.declared.lo = 1;
  }
  Bitvector withheld;  // a joined rank has another idea of these names
  for (const std::string& name : undeclared_) {
    if (const Domain* domain = table_.Find(name))
      for (const int id : domain->ids) withheld.Set(id);
  }
  actions_->push_back(
      StartRound{EncodeRound(status, offered_all_, withheld, held_, table_.limit())});
  phase_ = Phase::kRound;
}

std::vector<Negotiator::Impl::Proposal> Negotiator::Impl::Proposals() const {
  std::vector<Proposal> proposals;
  proposals.reserve(undeclared_.size());
  for (const std::string& name : undeclared_) {
    const DeclarationPtr& declaration = batches_.at(name).declaration;
    proposals.push_back(
        {DigestOf(name, options_.key), SignatureDigest(*declaration, options_.key), declaration});
  }
  std::sort(proposals.begin(), proposals.end(),
            [](const Proposal& a, const Proposal& b) { return a.name_digest < b.name_digest; });
  return proposals;
}

// Its ready groups may run: not abandoned, and not cut short by this rank's shutdown.
bool Negotiator::Impl::Offers(const Batch& batch) const {
  return !batch.abandoned && (!shutdown_requested_ || batch.whole());
}

bool Negotiator::Impl::OffersAny() const {
  return std::any_of(batches_.begin(), batches_.end(),
                     [this](const auto& entry) { return Offers(entry.second); });
}

// --- For stall reports and messages
// -----------------------------------------------------------------------------------------

std::vector<Negotiator::Pending> Negotiator::Impl::PendingBatches() const {
  std::vector<Pending> result;
  for (const auto& [name, batch] : batches_) {
    Pending pending{name, {}, {}};
    for (size_t group = 0; group < batch.ready.size(); ++group) {
      if (batch.domain && batch.domain->ran[group]) continue;
      (batch.ready[group] ? pending.ready_groups : pending.missing_groups)
          .push_back(static_cast<int>(group));
    }
    result.push_back(std::move(pending));
  }
  std::sort(result.begin(), result.end(),
            [](const Pending& a, const Pending& b) { return a.domain < b.domain; });
  return result;
}

bool Negotiator::Impl::Lacks(const std::string& domain, int group) const {
  const auto found = batches_.find(domain);
  if (found == batches_.end()) return !joined_;
  const Batch& batch = found->second;
  const size_t at = static_cast<size_t>(group);
  if (batch.domain && at < batch.ready.size() && batch.domain->ran[at]) return false;
  return at >= batch.ready.size() || !batch.ready[at] || !Offers(batch);
}

std::string Negotiator::Impl::RankName(int rank) const {
  return RankSet(rank).Describe(options_.world_ranks);
}

void Negotiator::Impl::Refuse(const std::string& what) const {
  throw Error(Kind::kInternal, "negotiator of " + RankName(options_.rank) + ": " + what);
}

}  // namespace gradred::core
