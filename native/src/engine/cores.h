// The cores of this rank, as far as waiting threads need to know.
#pragma once

#include "comm/world.h"

namespace gradred::engine {

// That it can use without taking another's: its own where it is bound to some, else its share of
// the machine's.
double CoresOfRank(const comm::Topology& topology);

// Whether the engine's threads spin (see Backoff in comm/transport.h): not on the one core on which
// their rank computes. Where ranks share cores, they do: a yield is how the next one gets there.
inline bool ThreadsSpin(const comm::Topology& topology) {
  const double cores = CoresOfRank(topology);
  return cores < 1 || cores >= 2;
}

}  // namespace gradred::engine
