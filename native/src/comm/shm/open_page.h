// How the ranks of one machine come to share a page while a world opens.
#pragma once

#include <memory>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/shm/page.h"

namespace gradred::comm::shm {

// Collective over the bootstrap. machine_of[r] tells machines apart; the lowest rank of each makes
// its page. Tries the ways of `namings` in turn, on all machines alike; when none works, throws on
// all ranks the same kUnsupported with the reasons.
std::shared_ptr<Page> OpenPage(Bootstrap& bootstrap, const std::vector<int>& machine_of,
                               uint64_t nonce,
                               const std::vector<Naming>& namings = {Naming::kAnonymous,
                                                                     Naming::kNamed});

}  // namespace gradred::comm::shm
