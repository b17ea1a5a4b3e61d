// Seam: the orchestration protocol of one process set, as a state machine. Events in, actions out;
// no threads, no I/O, no clock. The engine performs the actions with a communicator, the property
// tests on a virtual clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace gradred::core {

// Note [Orchestration]
// A *domain* is a list of entries that a rank declares whole (the gradients of one optimizer, or
// one call). A *batch* is one pass over a domain; the k-th batch of a domain on a rank belongs to
// the k-th on the others. A domain is cut into *groups* of consecutive entries; a group of a batch
// is *complete* on a rank when each of its entries was submitted. Ranks agree by *rounds*: an AND
// over ranks of a bitvector with two bits a group, S and not-S, so that one AND gives A (complete
// everywhere) and U (complete somewhere). Groups of A run at once, in the order of ids, on all
// ranks alike. W = U without A. The *awaited bit* is the lowest id in W (after k empty rounds in a
// row the k-th, cyclic). A rank enters the next round if and only if
//   1. W is empty and it has a complete group, or
//   2. it holds the awaited bit, or
//   3. it has a status to raise (new declaration, abandon, join, shutdown), or
//   4. it holds something, lacks the awaited bit, and its fallback ran out (1 ms, times 1.5, up to
//   5 ms, reset by a round that
//      agreed on something).
// New declarations carry their digest in the round's words; where all ranks raise the same list,
// the round itself agrees on them (ids in the order of name digests). Otherwise, and for abandons,
// joins and shutdowns, the same round is followed by a union exchange of records (and by a second
// one where an agreed name gets a new signature and somebody has the old one pending).
// docs/protocol.md has the whole text.

struct EntryText {
  std::string signature;  // operation, dtype, shape, scale, root: must agree
  std::string label;      // for messages; may differ over ranks
};

// What a rank declares of a domain. Equal name, entries' signatures and cuts on all ranks, or it is
// a Mismatch.
struct Declaration {
  std::string name;
  std::vector<EntryText> entries;
  std::vector<int> group_ends;  // ascending, the last equals entries.size()
  std::string payload;  // opaque to the negotiator; travels with the text so that joined ranks can
                        // supply zeros
};
using DeclarationPtr = std::shared_ptr<const Declaration>;

// --- Events
// -------------------------------------------------------------------------------------------------------------
// The next batch of a domain starts here. Only after the previous batch of that domain ended on
// this rank (each group Run, or Fail). The same step may answer with Fail: then the batch has ended
// already, and no Ready may follow. Passing the same pointer as for the batch before spares
// comparing the texts.
struct Begin {
  DeclarationPtr declaration;
};
struct Ready {
  std::string domain;
  int group;
};  // a group of the started batch is complete
// Give up the groups of the started batch that have not run; no Ready of it after that. The batch
// ends later, by Fail or, where the words of its last groups were on their way, by their Run: until
// then groups that were Ready may still come as Run, with this rank's data.
struct Abandon {
  std::string domain;
  std::string reason;
  Kind kind = Kind::kAbandoned;  // kMismatch: the reason is the whole text
};
// No Begin from here until AllJoined. Batches that were started before go on as usual (Ready and
// Abandon may come); this rank counts as joined once all their groups are ready.
struct Join {};
// No more Begin, Ready, Abandon and Join from here, for good. Started batches whose groups are all
// ready may still Run, the others Fail; rounds go on until AllShutDown.
struct Shutdown {
  std::string reason;
};
struct RoundDone {
  std::vector<uint64_t> words;
};  // result of StartRound
struct UnionDone {
  std::string blob;
};  // result of StartUnion
struct Tick {};  // NextWake() has passed
using Event = std::variant<Begin, Ready, Abandon, Join, Shutdown, RoundDone, UnionDone, Tick>;

// --- Actions, to be performed in order
// ---------------------------------------------------------------------------------
struct StartRound {
  std::vector<uint64_t> words;
};  // AND over the set's ranks, word by word
struct StartUnion {
  std::string blob;
};  // union over the set's ranks by Negotiator::Merge
// Reduce this group now, after those of earlier Run actions: the same sequence on all ranks. `mine`
// is false where this rank has joined and supplies zeros; the declaration is then that of the
// lowest rank that brought it to the union, else this rank's own. `someone_joined`: at least one
// rank has joined, and may supply zeros (equal on all ranks).
struct Run {
  DeclarationPtr declaration;
  int group;
  bool mine;
  bool someone_joined;
};
// The groups of this rank's started batch of `domain` that have not run fail; the batch has ended.
// Comes alike, with the same text, on every rank, at once or when that rank starts the batch in
// question. Groups that came as Run before are agreed and still to be reduced. A rank that holds no
// complete group enters no round, and hears of a failure when it next does.
struct Fail {
  std::string domain;
  Status status;
};
// Ends Join, on ranks that joined and did not shut down: each rank of the set has joined or shut
// down. last_rank (in the set) is the highest of those whose join became known last.
struct AllJoined {
  int last_rank;
};
struct AllShutDown {
};  // every rank has raised Shutdown and nothing is pending: no event may follow
using Action = std::variant<StartRound, StartUnion, Run, Fail, AllJoined, AllShutDown>;

struct NegotiatorOptions {
  int rank = 0;  // in the set
  int size = 1;
  std::vector<int> world_ranks;  // [size], for messages; empty: the same numbers
  std::string set;               // for messages: "process set 3"; empty: not said
  uint64_t key = 0;              // of the digests, equal on all ranks
  bool timer = true;             // rule 4
  Nanos fallback_first = kMillisecond, fallback_cap = 5 * kMillisecond;
  int64_t retire_after =
      10000;  // rounds without a run; then the ids are given back, in an agreed round
};

struct NegotiatorCounters {
  int64_t rounds = 0, empty_rounds = 0, unions = 0, runs = 0, fallbacks = 0, domains = 0, ids = 0;
};

class Negotiator {
 public:
  explicit Negotiator(NegotiatorOptions options);
  ~Negotiator();

  // Handles one event; appends to *actions. Between StartRound/StartUnion and its
  // RoundDone/UnionDone other events may come; they count for the next round. Throws
  // Error(kInternal) for an event that breaks the rules above (a caller's fault) and
  // kTransportError for words or blobs that cannot be. After a throw the negotiator is of no more
  // use: end the engine. The number of words changes from round to round, alike on all ranks; blobs
  // differ in size from rank to rank.
  void Step(const Event& event, Nanos now, std::vector<Action>* actions);

  // When to send Tick, or kForever; changes with every Step. A Tick that comes too early or too
  // late does no harm.
  Nanos NextWake() const;

  // Merge of two union blobs: commutative, associative, idempotent, canonical.
  static std::string Merge(const std::string& a, const std::string& b);

  // --- For stall reports
  // -------------------------------------------------------------------------------------------------
  struct Pending {
    std::string domain;
    std::vector<int> ready_groups,
        missing_groups;  // of the started batch, not yet run; ready here / not even here
  };
  std::vector<Pending> PendingBatches() const;
  // The domain has no started batch here, or its group is not complete here: this rank is what
  // others wait for.
  bool Lacks(const std::string& domain, int group) const;

  const NegotiatorCounters& counters() const;
  // A digest of the id table: equal on all ranks after every round (tests).
  uint64_t TableDigest() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradred::core
