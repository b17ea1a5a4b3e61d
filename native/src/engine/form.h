// What a batch of a domain looks like under a plan: the caller's entries in another order, and
// entries of the engine's own before them.
#pragma once

#include <memory>
#include <vector>

#include "engine/plan.h"
#include "engine/spec.h"

namespace gradred::engine {

enum class Purpose : uint8_t {
  kPlain,
  kCompare,   // carries digests of what each rank would do next
  kProbe,     // carries groups of some sizes whose times are measured
  kExchange,  // carries what each rank has measured
};

struct Form {
  Purpose purpose = Purpose::kPlain;
  ArrangementPtr arrangement;
  DomainSpecPtr spec;         // what the engine runs
  std::vector<int> place_of;  // [position in the caller's list]
  int extra = 0;              // entries of the engine's own, each a group, before the others
};
using FormPtr = std::shared_ptr<const Form>;

// Sizes of the groups of a kProbe, bytes on the wire, ascending: from 4 KiB, each 4 times the one
// before, up to 16 MiB or the first that holds the whole domain. At least two.
std::vector<int64_t> ProbeSizes(const DomainSpec& listed);
constexpr int kProbeRepeats = 3;
// Bytes of an entry in the fusion buffer.
int64_t WireNbytes(const EntrySpec& entry);

FormPtr MakeForm(const DomainSpecPtr& listed, Purpose purpose, const ArrangementPtr& arrangement);

}  // namespace gradred::engine
