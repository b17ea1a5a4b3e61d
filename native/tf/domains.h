// Specs as the ops see them, and the order in which a domain's entries travel.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/spec.h"

namespace gradred::tf {

// Note [Names of specs]
// A graph keeps the spec that it was traced with for as long as it lives, while the domain of the
// same name may be traced again with other shapes. So the ops carry "<domain>#<number of the spec
// in this process>", and specs are registered under that. The engine, and so the other ranks, see
// "<domain>".

// Note [Arrangements]
// An optimizer's entries are listed as its variables are, which is alike on all ranks. They should
// travel in the order in which the backward pass produces the gradients, which each rank reads from
// its own graph; and graphs may differ between ranks, for instance where a gradient is None on one
// of them. So each rank proposes an arrangement, and the first batch of a domain goes as listed,
// with an entry more in which the ranks compare digests of their proposals. If all are equal, all
// later batches are arranged so; else they go as listed. A batch that begins before this is decided
// is opened after it.
struct Arrangement {
  std::vector<int> order;       // order[place] = position in the list
  std::vector<int> group_ends;  // of places
  int64_t Digest() const;       // not negative
};
using ArrangementPtr = std::shared_ptr<const Arrangement>;

// What this rank proposes for the spec `key`, before a graph with it runs.
void Propose(const std::string& key, ArrangementPtr arrangement);

enum class Form : uint8_t { kAsListed, kDeciding, kArranged };
struct Choice {
  Form form = Form::kAsListed;
  ArrangementPtr arrangement;  // of kArranged; of kDeciding: what this rank proposes
};

// One domain of a graph: a spec under the name that the engine sees. Kept for good.
class Domain {
 public:
  // The spec registered as `key`, its name without the number and with `suffix`. Throws kInternal
  // when nothing is registered.
  static Domain& For(const std::string& key, const std::string& suffix);

  const engine::DomainSpecPtr& spec() const { return spec_; }  // as listed

  // Calls `chosen` once with the form of the next batch: here, or from Decide. Calls come in the
  // order of Choose.
  void Choose(const std::shared_ptr<engine::Engine>& engine, std::function<void(Choice)> chosen);
  // The outcome of the batch that got kDeciding.
  void Decide(const Status& status, bool equal);

  // The spec to open; `shapes` by position. The same pointer for the same arguments as the last
  // time.
  engine::DomainSpecPtr SpecFor(const Choice& choice, const std::vector<engine::Shape>& shapes);

 private:
  enum class State : uint8_t { kUndecided, kDeciding, kDecided };
  struct Cached {
    ArrangementPtr arrangement;
    std::vector<engine::Shape> shapes;
    engine::DomainSpecPtr spec;
  };
  // The decision is one of all traces of a domain.
  struct Decision {
    std::mutex mutex;
    std::weak_ptr<engine::Engine> engine;  // of the decision: after a new init() it is made anew
    State state = State::kUndecided;
    ArrangementPtr arrangement;  // null: as listed
    ArrangementPtr proposed;     // by the batch that decides
    std::deque<std::pair<ArrangementPtr, std::function<void(Choice)>>> waiting;
  };

  Domain(engine::DomainSpecPtr spec, ArrangementPtr proposal, Decision* decision)
      : spec_(std::move(spec)), proposal_(std::move(proposal)), decision_(decision) {}

  const engine::DomainSpecPtr spec_;
  const ArrangementPtr proposal_;  // null: there is nothing to decide
  Decision* const decision_;
  std::mutex mutex_;
  std::map<Form, Cached> cache_;
};

// `spec` with unknown dimensions taken from `shapes`, one for each entry. Returns `recent` if that
// is already so.
engine::DomainSpecPtr WithShapes(const engine::DomainSpecPtr& spec,
                                 const std::vector<engine::Shape>& shapes,
                                 const engine::DomainSpecPtr& recent);

// Throws kInvalidArgument when a tensor does not fit its entry.
void CheckFits(const engine::DomainSpec& spec, int position, DType dtype,
               const engine::Shape& shape);

}  // namespace gradred::tf
