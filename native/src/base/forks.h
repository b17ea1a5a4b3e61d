// Tells a forked child from its parent without the system call that getpid() is.
#pragma once

#include <atomic>

namespace gradred {

namespace detail {
extern std::atomic<int> forks;
}

// How many forks, by the C library's fork(), lie between the process that loaded the library and
// this one.
inline int Forks() { return detail::forks.load(std::memory_order_relaxed); }

}  // namespace gradred
