#include "core/id_table.h"

#include <utility>

namespace gradred::core {

Domain* IdTable::Find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second.get();
}

Domain* IdTable::Add(DeclarationPtr text, const Digest& name_digest, const Digest& signature,
                     int64_t round) {
  auto owned = std::make_unique<Domain>();
  Domain* domain = owned.get();
  domain->text = std::move(text);
  domain->name_digest = name_digest;
  domain->signature = signature;
  domain->last_round = round;
  domain->by_age = by_age_.insert(by_age_.end(), domain);
  by_name_[domain->text->name] = std::move(owned);
  TakeIds(domain);
  return domain;
}

void IdTable::Resign(Domain* domain, DeclarationPtr text, const Digest& signature, int64_t round) {
  if (domain->ran_count > 0)
    throw Error(Kind::kInternal, "'" + domain->text->name + "' changes its signature in a batch");
  const bool same_cuts = text->group_ends.size() == domain->ids.size();
  if (!same_cuts) ReleaseIds(domain);
  domain->text = std::move(text);
  domain->last_begun = nullptr;
  domain->signature = signature;
  if (!same_cuts) TakeIds(domain);
  Chain(signature.lo);
  Touch(domain, round);
}

void IdTable::Remove(Domain* domain) {
  ReleaseIds(domain);
  Chain(domain->name_digest.hi);
  by_age_.erase(domain->by_age);
  by_name_.erase(by_name_.find(domain->text->name));  // ends *domain and its text
}

void IdTable::MarkRun(Domain* domain, int group, int64_t round) {
  domain->ran[group] = 1;
  ++domain->ran_count;
  Chain(static_cast<uint64_t>(domain->ids[group]));
  Touch(domain, round);
}

void IdTable::EndBatch(Domain* domain, int64_t round) {
  domain->ran.assign(domain->ids.size(), 0);
  domain->ran_count = 0;
  Chain(static_cast<uint64_t>(++domain->batches));
  Touch(domain, round);
}

void IdTable::Touch(Domain* domain, int64_t round) {
  domain->last_round = round;
  by_age_.splice(by_age_.end(), by_age_, domain->by_age);
}

void IdTable::TakeIds(Domain* domain) {
  const int groups = static_cast<int>(domain->text->group_ends.size());
  domain->ran.assign(groups, 0);
  domain->ids.reserve(groups);
  for (int group = 0; group < groups; ++group) {
    int id = limit();
    if (free_.empty()) {
      slots_.emplace_back();
    } else {
      id = *free_.begin();
      free_.erase(free_.begin());
    }
    slots_[id] = {domain, group};
    domain->ids.push_back(id);
    Chain(static_cast<uint64_t>(id));
  }
  Chain(domain->name_digest.lo);
  Chain(domain->signature.lo);
}

void IdTable::ReleaseIds(Domain* domain) {
  for (const int id : domain->ids) {
    slots_[id] = {};
    free_.insert(id);
  }
  domain->ids.clear();
  while (!slots_.empty() && slots_.back().domain == nullptr) {
    free_.erase(limit() - 1);
    slots_.pop_back();
  }
}

void IdTable::Chain(uint64_t value) {
  digest_ = (digest_ ^ value) * 0x9e3779b97f4a7c15ULL;
  digest_ ^= digest_ >> 29;
}

}  // namespace gradred::core
