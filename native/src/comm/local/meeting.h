// How the ranks of a job on one machine meet without MPI: at a socket of rank 0.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/bootstrap.h"
#include "comm/job_notes.h"

namespace gradred::comm::local {

// Rank 0 listens on an abstract unix socket (no file) named by user and `job`; the others connect.
// Only processes of the same user are let in. Returns when all have come. Until `deadline`: then
// kTimeout naming the ranks that have not come, on all that have. A rank that ends meanwhile is
// kPeerLost on all, naming it. What `check` says of ranks that will not come is thrown on all.
std::unique_ptr<Bootstrap> Meet(
    const std::string& job, int rank, int size, Nanos deadline,
    const OpeningCheck& check = [] { return std::nullopt; });

}  // namespace gradred::comm::local
