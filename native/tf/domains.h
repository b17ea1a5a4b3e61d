// Specs as the ops see them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/spec.h"

namespace gradred::tf {

// Note [Names of specs]
// A graph keeps the spec that it was traced with for as long as it lives, while the domain of the
// same name may be traced again with other shapes. So the ops carry "<domain>#<number of the spec
// in this process>", and specs are registered under that. The engine, and so the other ranks, see
// "<domain>". Graphs of tf.compat.v1 have "<domain>#s<number>". TensorFlow keeps a kernel for ever
// for each value of an eager op's attribute, so eager calls carry "#e<number>", a short name of the
// spec, which is given to another one when that is forgotten.

std::string DomainOf(const std::string& key);
bool IsOfSession(const std::string& key);
bool IsOfEager(const std::string& key);

// The spec of a graph or an eager call as the engine sees it: what is registered as `key`, under
// its name without the number and with `suffix`; the same pointer each time. Throws kInternal when
// nothing is registered.
engine::DomainSpecPtr SpecFor(const std::string& key, const std::string& suffix);

// `spec`, of SpecFor, with unknown dimensions taken from `shapes`, one for each entry. The same
// pointer for the same shapes as the last time.
engine::DomainSpecPtr WithShapes(const engine::DomainSpecPtr& spec,
                                 const std::vector<engine::Shape>& shapes);

// Throws kInvalidArgument when a tensor does not fit its entry.
void CheckFits(const engine::DomainSpec& spec, int position, DType dtype,
               const engine::Shape& shape);

}  // namespace gradred::tf
