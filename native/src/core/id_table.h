// The names that all ranks agreed on, their ids, and how far their current batch has come. Equal on
// all ranks after every round: nothing here may depend on what this rank alone knows (but for the
// texts' labels and payloads).
#pragma once

#include <list>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/digest.h"
#include "core/negotiator.h"

namespace gradred::core {

struct Domain {
  DeclarationPtr text;
  DeclarationPtr last_begun;  // this rank's own, found equal to `text`: spares comparing it again
  Digest name_digest, signature;
  std::vector<int> ids;   // of the groups
  std::vector<char> ran;  // groups of the current batch
  int ran_count = 0;
  int64_t batches = 0;     // that have ended since the name was agreed
  int64_t last_round = 0;  // in which it was agreed, ran or failed
  std::list<Domain*>::iterator by_age;
};

class IdTable {
 public:
  struct Slot {
    Domain* domain = nullptr;  // null: a free id
    int group = 0;
  };

  Domain* Find(const std::string& name) const;
  // Free ids, and those beyond the last: an empty slot.
  Slot At(int id) const { return id < limit() ? slots_[id] : Slot(); }
  int limit() const { return static_cast<int>(slots_.size()); }  // ids are below
  int64_t domains() const { return static_cast<int64_t>(by_name_.size()); }
  int64_t ids() const { return limit() - static_cast<int64_t>(free_.size()); }

  // The name is new.
  Domain* Add(DeclarationPtr text, const Digest& name_digest, const Digest& signature,
              int64_t round);
  // Another signature for a name of which no group of the current batch ran. Keeps the ids if the
  // number of groups is the same.
  void Resign(Domain* domain, DeclarationPtr text, const Digest& signature, int64_t round);
  void Remove(Domain* domain);
  void MarkRun(Domain* domain, int group, int64_t round);
  void EndBatch(Domain* domain, int64_t round);
  void Touch(Domain* domain, int64_t round);

  Domain* LeastRecentlyUsed() const { return by_age_.empty() ? nullptr : by_age_.front(); }

  // Of everything that was ever agreed, in its order.
  uint64_t digest() const { return digest_; }
  void Chain(uint64_t value);

 private:
  void TakeIds(Domain* domain);
  void ReleaseIds(Domain* domain);

  std::unordered_map<std::string, std::unique_ptr<Domain>> by_name_;
  std::vector<Slot> slots_;  // the last one is in use
  std::set<int> free_;       // of the ids below limit()
  std::list<Domain*> by_age_;
  uint64_t digest_ = 0;
};

}  // namespace gradred::core
