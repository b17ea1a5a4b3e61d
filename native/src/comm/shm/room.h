// How much memory can still be had, asked before it is taken: the kernel ends a process that runs
// out later.
#pragma once

#include <cstdint>
#include <string>

namespace gradred::comm::shm {

struct Room {
  int64_t nbytes = INT64_MAX;
  std::string
      where;  // what sets the limit: "the memory of this machine", "its control group", "/dev/shm"
};

// The smallest of: available memory and swap, the limits of the process's control groups, the file
// size limit, and, for memory that has a name, the free space of /dev/shm. Never throws; what
// cannot be read sets no limit.
Room FindRoom(bool named);

}  // namespace gradred::comm::shm
