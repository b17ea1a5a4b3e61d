#include "base/forks.h"

#include <pthread.h>

namespace gradred {

namespace detail {
std::atomic<int> forks{0};
}

namespace {

[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { detail::forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace
}  // namespace gradred
