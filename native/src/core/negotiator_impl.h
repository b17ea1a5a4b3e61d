// State and steps of the negotiator. negotiator.cpp: events and entering rounds;
// negotiator_round.cpp: what a round and its unions agree on.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/bitvector.h"
#include "core/id_table.h"
#include "core/negotiator.h"
#include "core/records.h"
#include "core/round_words.h"

namespace gradred::core {

// Note [Common and local knowledge]
// `table_`, `joins_`, `shut_down_`, `pending_`, `awaited_` and the counts of rounds change only by
// what a round or a union brought: they are equal on all ranks. The rest is this rank's own. A
// batch that is started here is always the common current one, number Domain::batches: it can only
// end by a Run that needs this rank, or by a failure that all ranks learn in the same round. A rank
// that has not started a batch when it fails owes it: the failure waits in `owed_` for the Begin
// that belongs to it.
class Negotiator::Impl {
 public:
  explicit Impl(NegotiatorOptions options);

  void Step(const Event& event, Nanos now, std::vector<Action>* actions);
  Nanos NextWake() const { return phase_ == Phase::kIdle ? fallback_at_ : kForever; }
  std::vector<Pending> PendingBatches() const;
  bool Lacks(const std::string& domain, int group) const;
  const NegotiatorCounters& counters() const { return counters_; }
  uint64_t TableDigest() const { return table_.digest(); }

 private:
  enum class Phase { kIdle, kRound, kUnion, kSecondUnion, kEnded };

  struct Batch {  // started here, not ended
    DeclarationPtr declaration;
    Domain* domain = nullptr;  // null: not agreed on
    std::vector<char> ready;
    int ready_count = 0;
    bool abandoned = false;
    std::string reason;  // of the abandon
    Kind abandoned_kind = Kind::kAbandoned;
    bool whole() const { return ready_count == static_cast<int>(ready.size()); }
  };
  struct ShutDownRank {
    int rank;
    std::string reason;
    std::set<std::string> completing;  // domains whose current batch it has submitted whole
  };
  struct Proposal {  // a declaration that this rank's round word brought
    Digest name_digest, signature;
    DeclarationPtr declaration;
  };

  void On(const Begin& event);
  void On(const Ready& event);
  void On(const Abandon& event);
  void On(const Join& event);
  void On(const Shutdown& event);
  void On(const RoundDone& event);
  void On(const UnionDone& event);
  void On(const Tick&) {}

  // Entering rounds.
  bool MustEnter();
  void EnterRound();
  std::vector<Proposal> Proposals() const;
  bool Offers(const Batch& batch) const;
  bool OffersAny() const;

  // After a round.
  void RunAgreed();
  Records MyRecords() const;
  bool Resigns(const Records& records) const;
  Records MyVariants(const Records& records) const;
  void Apply(const Records& records);
  void ApplyNews(const Records& records);
  void ApplyAbandoned(const Records& records);
  void ApplyShutDowns(const Records& records);
  void FinishRound();
  void EndJoin();
  void Retire();

  // Changes of common knowledge, with what follows here.
  void Agree(const Digest& name_digest, const Digest& signature, DeclarationPtr text);
  void FailBatch(const std::string& name, const Status& status);
  void EndBatch(const std::string& name);

  void Bind(Batch* batch, Domain* domain);
  void Unbind(const Domain& domain);
  void FailHere(const std::string& name, const Status& status);
  void ClearBits(const Domain& domain);
  const ShutDownRank* WhoPrevents(const std::string& name) const;
  Status ShutDownStatus(const ShutDownRank& who) const;
  std::string RankName(int rank) const;
  [[noreturn]] void Refuse(const std::string& what) const;

  const NegotiatorOptions options_;
  NegotiatorCounters counters_;
  Nanos now_ = 0;
  std::vector<Action>* actions_ = nullptr;  // of the step in progress

  // Common.
  Phase phase_ = Phase::kIdle;
  IdTable table_;
  Bitvector pending_;                    // W
  int awaited_ = -1;                     // g*, or -1
  int empty_rounds_ = 0;                 // in a row
  std::map<int, int64_t> joins_;         // joined ranks: the round in which each did
  std::vector<ShutDownRank> shut_down_;  // in the order in which they did

  // Common, of the round in progress.
  RoundResult round_;
  bool agreed_on_something_ = false;
  std::set<std::string> ended_;  // batches that a record of this round ended
  Records first_union_;

  // Local.
  std::unordered_map<std::string, Batch> batches_;
  std::set<std::string> undeclared_;  // of batches_: not agreed on, offered
  std::set<std::string> abandoned_;   // of batches_
  std::unordered_map<std::string, std::vector<Status>> owed_;  // oldest first
  Bitvector held_;  // groups complete here, not run: the bits S
  bool join_requested_ = false, joined_ = false, join_announced_ = false;
  bool shutdown_requested_ = false, shutdown_announced_ = false;
  std::string shutdown_reason_;
  Nanos fallback_ = 0, fallback_at_ = kForever;

  // Local, of the round in progress.
  std::vector<Proposal> proposed_;
  bool offered_all_ = false;
};

}  // namespace gradred::core
