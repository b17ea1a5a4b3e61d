// What a round and the unions that follow it agree on.
#include <algorithm>

#include "base/bytes.h"
#include "core/declaration.h"
#include "core/negotiator_impl.h"

namespace gradred::core {

void Negotiator::Impl::On(const RoundDone& event) {
  if (phase_ != Phase::kRound) Refuse("RoundDone without StartRound");
  try {
    round_ = DecodeRound(event.words, table_.limit(), static_cast<uint32_t>(table_.digest()));
  } catch (const Error& e) {
    throw Error(e.kind(), RankName(options_.rank) + " in round " +
                              std::to_string(counters_.rounds) + " of " + options_.set + ": " +
                              e.what());
  }
  ++counters_.rounds;
  agreed_on_something_ = false;
  ended_.clear();
  pending_ = round_.pending;
  RunAgreed();
  if (round_.declared_alike) {
    // See Note [Equal lists]
    for (const Proposal& proposal : proposed_)
      Agree(proposal.name_digest, proposal.signature, proposal.declaration);
  }
  if (round_.anybody_has_records || (round_.anybody_declares && !round_.declared_alike)) {
    actions_->push_back(StartUnion{MyRecords().Encode()});
    phase_ = Phase::kUnion;
  } else {
    FinishRound();
  }
}

// Note [Equal lists]
// Where every rank raised the same list of (name, signature), the round itself has agreed on it.
// That holds for a known name that gets another signature, too: a rank's list holds only names
// whose batch it has started, so every rank's current batch of that name has the new signature and
// nobody can hold one with the old.

void Negotiator::Impl::On(const UnionDone& event) {
  if (phase_ != Phase::kUnion && phase_ != Phase::kSecondUnion)
    Refuse("UnionDone without StartUnion");
  ++counters_.unions;
  Records records = Records::Decode(event.blob);
  if (phase_ == Phase::kUnion && Resigns(records)) {
    actions_->push_back(StartUnion{MyVariants(records).Encode()});
    first_union_ = std::move(records);
    phase_ = Phase::kSecondUnion;
    return;
  }
  if (phase_ == Phase::kSecondUnion) records.MergeFrom(std::move(first_union_));
  first_union_ = Records();
  Apply(records);
  FinishRound();
}

void Negotiator::Impl::RunAgreed() {
  round_.agreed.ForEach([this](int id) {
    const IdTable::Slot slot = table_.At(id);
    if (!slot.domain)
      throw Error(Kind::kTransportError,
                  "a round agreed on id " + std::to_string(id) + ", which nobody uses");
    const std::string name = slot.domain->text->name;
    const auto found = batches_.find(name);
    const bool mine = found != batches_.end() && found->second.domain == slot.domain;
    if (!mine && !offered_all_) Refuse("a round agreed on '" + name + "', not offered here");
    actions_->push_back(Run{mine ? found->second.declaration : slot.domain->text, slot.group, mine,
                            round_.anybody_joined});
    held_.Clear(id);
    table_.MarkRun(slot.domain, slot.group, counters_.rounds);
    ++counters_.runs;
    agreed_on_something_ = true;
    if (slot.domain->ran_count == static_cast<int>(slot.domain->ids.size())) EndBatch(name);
  });
}

// --- What this rank brings to a union
// ---------------------------------------------------------------------------------------

Records Negotiator::Impl::MyRecords() const {
  Records records;
  if (!round_.declared_alike) {
    for (const Proposal& proposal : Proposals())
      records.AddNew(proposal.name_digest, proposal.signature, options_.rank,
                     *proposal.declaration);
  }
  for (const std::string& name : abandoned_) {
    const Domain* domain = table_.Find(name);
    const Batch& batch = batches_.at(name);
    records.abandoned[{name, options_.rank}] = {domain ? domain->batches : 0, batch.reason,
                                                batch.abandoned_kind};
  }
  if (joined_ && !join_announced_) records.joins[options_.rank] = counters_.rounds;
  if (shutdown_requested_ && !shutdown_announced_) {
    Writer completing;
    std::set<std::string> names;
    for (const auto& [name, batch] : batches_)
      if (Offers(batch)) names.insert(name);
    for (const std::string& name : names) completing.PutString(name);
    records.shutdowns[options_.rank] = {shutdown_reason_, completing.Take()};
  }
  return records;
}

// A name that the table knows with another signature: ranks that have it pending did not bring
// theirs, for to them it is agreed.
bool Negotiator::Impl::Resigns(const Records& records) const {
  return std::any_of(records.news.begin(), records.news.end(), [this](const auto& entry) {
    Reader text(entry.second.text);
    return table_.Find(GetDeclaration(&text).name) != nullptr;
  });
}

Records Negotiator::Impl::MyVariants(const Records& records) const {
  Records mine;
  for (const auto& [key, record] : records.news) {
    Reader text(record.text);
    const auto found = batches_.find(GetDeclaration(&text).name);
    if (found == batches_.end() || !Offers(found->second)) continue;
    const Declaration& declaration = *found->second.declaration;
    mine.AddNew(key.first, SignatureDigest(declaration, options_.key), options_.rank, declaration);
  }
  return mine;
}

// --- What a union agrees on
// -------------------------------------------------------------------------------------------------

void Negotiator::Impl::Apply(const Records& records) {
  if (!records.empty()) agreed_on_something_ = true;
  ApplyNews(records);
  ApplyAbandoned(records);
  joins_.insert(records.joins.begin(), records.joins.end());
  if (records.joins.count(options_.rank)) join_announced_ = true;
  ApplyShutDowns(records);
}

void Negotiator::Impl::ApplyNews(const Records& records) {
  for (auto at = records.news.begin(); at != records.news.end();) {
    const auto first = at;
    std::vector<Variant> variants;
    for (; at != records.news.end() && at->first.first == first->first.first; ++at) {
      Reader text(at->second.text);
      variants.push_back(
          {at->second.holders, std::make_shared<const Declaration>(GetDeclaration(&text))});
    }
    if (variants.size() == 1) {
      Agree(first->first.first, first->first.second, variants[0].declaration);
      continue;
    }
    std::sort(variants.begin(), variants.end(), [](const Variant& a, const Variant& b) {
      return a.holders.lowest() < b.holders.lowest();
    });
    const std::string& name = variants[0].declaration->name;
    FailBatch(name, {Kind::kMismatch, DescribeMismatch(name, variants, options_)});
  }
}

void Negotiator::Impl::ApplyAbandoned(const Records& records) {
  for (const auto& [key, record] : records.abandoned) {
    const auto& [name, rank] = key;
    if (ended_.count(name)) continue;  // by a mismatch, or by a lower rank
    const Domain* domain = table_.Find(name);
    if (domain && record.batch != domain->batches)
      throw Error(Kind::kInternal,
                  RankName(rank) + " abandoned batch " + std::to_string(record.batch) + " of '" +
                      name + "', but the ranks are at " + std::to_string(domain->batches));
    const std::string text = record.kind == Kind::kAbandoned
                                 ? RankName(rank) + " abandoned batch of " +
                                       NameInSet(name, options_) + ": " + record.reason
                                 : record.reason;
    FailBatch(name, {record.kind, text});
  }
}

void Negotiator::Impl::ApplyShutDowns(const Records& records) {
  if (records.shutdowns.empty()) return;
  for (const auto& [rank, record] : records.shutdowns) {
    ShutDownRank who{rank, record.reason, {}};
    for (Reader names(record.completing); !names.AtEnd();) {
      std::string name = names.GetString();
      if (!ended_.count(name)) who.completing.insert(std::move(name));
    }
    shut_down_.push_back(std::move(who));
    if (rank == options_.rank) shutdown_announced_ = true;
  }
  // Batches that cannot complete fail where they are started, and by Begin elsewhere. Their name
  // stays as it is, so that the text is the same whenever a rank comes to it.
  std::set<std::string> hopeless;
  for (const auto& [name, batch] : batches_)
    if (WhoPrevents(name)) hopeless.insert(name);
  for (const std::string& name : hopeless) FailHere(name, ShutDownStatus(*WhoPrevents(name)));
  const Bitvector waiting = pending_;
  waiting.ForEach([this](int id) {
    if (WhoPrevents(table_.At(id).domain->text->name)) pending_.Clear(id);
  });
}

// --- End of the round
// -------------------------------------------------------------------------------------------------------

void Negotiator::Impl::FinishRound() {
  phase_ = Phase::kIdle;
  proposed_.clear();
  if (round_.everybody_shut_down_idle) {
    actions_->push_back(AllShutDown{});
    phase_ = Phase::kEnded;
    return;
  }
  if (round_.anybody_joined && round_.everybody_join_idle) EndJoin();
  Retire();
  pending_.Shrink(table_.limit());
  held_.Shrink(table_.limit());
  if (agreed_on_something_) {
    empty_rounds_ = 0;
    fallback_ = options_.fallback_first;
  } else {
    ++empty_rounds_;
    ++counters_.empty_rounds;
  }
  const int waiting = pending_.Count();
  awaited_ = waiting == 0 ? -1 : pending_.Nth(std::max(0, empty_rounds_ - 1) % waiting);
}

// Nobody has a batch pending: each rank that joined or shut down said so in this round.
void Negotiator::Impl::EndJoin() {
  AllJoined last{-1};
  int64_t last_round = -1;
  for (const auto& [rank, round] : joins_) {
    if (round >= last_round) last.last_rank = rank;
    last_round = std::max(last_round, round);
  }
  if (joined_ && !shutdown_requested_) actions_->push_back(last);
  joins_.clear();
  join_requested_ = joined_ = join_announced_ = false;
  agreed_on_something_ = true;
}

// A domain that was not used for long, and that nobody holds anything of, gives its ids back. A
// rank that has started its next batch without any complete group declares it again.
void Negotiator::Impl::Retire() {
  for (Domain* domain = table_.LeastRecentlyUsed();
       domain &&
       counters_.rounds - domain->last_round >= std::max<int64_t>(1, options_.retire_after);
       domain = table_.LeastRecentlyUsed()) {
    const bool in_use =
        domain->ran_count > 0 || std::any_of(domain->ids.begin(), domain->ids.end(),
                                             [this](int id) { return pending_.Test(id); });
    if (in_use) {
      table_.Touch(domain, counters_.rounds);
      continue;
    }
    ClearBits(*domain);
    Unbind(*domain);
    table_.Remove(domain);
  }
}

// --- Changes of common knowledge
// --------------------------------------------------------------------------------------------

void Negotiator::Impl::Agree(const Digest& name_digest, const Digest& signature,
                             DeclarationPtr text) {
  agreed_on_something_ = true;
  Domain* domain = table_.Find(text->name);
  if (domain) {
    ClearBits(*domain);
    Unbind(*domain);
    table_.Resign(domain, std::move(text), signature, counters_.rounds);
  } else {
    domain = table_.Add(std::move(text), name_digest, signature, counters_.rounds);
  }
  const auto found = batches_.find(domain->text->name);
  if (found != batches_.end() && SameSignature(*found->second.declaration, *domain->text))
    Bind(&found->second, domain);
}

void Negotiator::Impl::FailBatch(const std::string& name, const Status& status) {
  agreed_on_something_ = true;
  ended_.insert(name);
  if (batches_.count(name)) {
    FailHere(name, status);
  } else if (!join_requested_ && !shutdown_requested_) {
    owed_[name].push_back(status);
  }
  EndBatch(name);
}

void Negotiator::Impl::EndBatch(const std::string& name) {
  for (ShutDownRank& who : shut_down_) who.completing.erase(name);
  if (Domain* domain = table_.Find(name)) {
    ClearBits(*domain);
    table_.EndBatch(domain, counters_.rounds);
  }
  undeclared_.erase(name);
  abandoned_.erase(name);  // where its groups were in the words already
  batches_.erase(name);
}

// --- What follows here
// ------------------------------------------------------------------------------------------------------

void Negotiator::Impl::Bind(Batch* batch, Domain* domain) {
  batch->domain = domain;
  domain->last_begun = batch->declaration;
  undeclared_.erase(domain->text->name);
  if (!Offers(*batch)) return;
  for (size_t group = 0; group < batch->ready.size(); ++group)
    if (batch->ready[group]) held_.Set(domain->ids[group]);
}

// The domain's entry in the table is about to change or to go.
void Negotiator::Impl::Unbind(const Domain& domain) {
  const auto found = batches_.find(domain.text->name);
  if (found == batches_.end()) return;
  found->second.domain = nullptr;
  if (Offers(found->second)) undeclared_.insert(found->first);
}

void Negotiator::Impl::FailHere(const std::string& name, const Status& status) {
  if (const Domain* domain = batches_.at(name).domain) {
    for (const int id : domain->ids) held_.Clear(id);
  }
  undeclared_.erase(name);
  abandoned_.erase(name);
  batches_.erase(name);
  actions_->push_back(Fail{name, status});
}

void Negotiator::Impl::ClearBits(const Domain& domain) {
  for (const int id : domain.ids) {
    pending_.Clear(id);
    held_.Clear(id);
  }
}

// The first rank that shut down without having submitted its current batch of `name` whole, or
// null.
const Negotiator::Impl::ShutDownRank* Negotiator::Impl::WhoPrevents(const std::string& name) const {
  for (const ShutDownRank& who : shut_down_)
    if (!who.completing.count(name)) return &who;
  return nullptr;
}

Status Negotiator::Impl::ShutDownStatus(const ShutDownRank& who) const {
  return {Kind::kAbandoned,
          RankName(who.rank) + " has shut down" + (who.reason.empty() ? "" : ": " + who.reason)};
}

}  // namespace gradred::core
