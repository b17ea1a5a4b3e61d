// Messages between the ranks of one machine, through rings in shared memory.
#pragma once

#include <memory>

#include "comm/shm/page.h"
#include "comm/transport.h"

namespace gradred::comm::shm {

// The `number`-th transport (0 ... kTransports - 1) of member `index` of the page; at most one at a
// time. Every event rings the bell, so MustPoll() is false. Messages of any size stream through the
// ring; a receiver always takes what has come, into the buffer of the posted receive or, when there
// is none yet, into memory of its own, so two messages never wait for each other.
std::unique_ptr<Transport> MakeTransport(std::shared_ptr<Page> page, int number, int index);

}  // namespace gradred::comm::shm
