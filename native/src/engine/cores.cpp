#include "engine/cores.h"

#include <sched.h>
#include <unistd.h>

namespace gradred::engine {

double CoresOfRank(const comm::Topology& topology) {
  const double all = static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mine;
  const double bound = sched_getaffinity(0, sizeof(mine), &mine) == 0 ? CPU_COUNT(&mine) : all;
  return bound < all ? bound : all / topology.local_size;
}

}  // namespace gradred::engine
