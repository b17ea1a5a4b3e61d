// Calls that cannot be interrupted, and may wait for somebody who never comes.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/status.h"

namespace gradred::comm {

// Runs `call` in a thread and returns or throws what it does. Looks at `check` meanwhile: what that
// finds is thrown, and the thread is left behind, after `leave`; it may still be in `call`, so that
// owns what it uses. Throws kTimeout, naming `what`, when `timeout` has passed.
template <class T>
T RunWatched(std::function<T()> call, const std::function<std::optional<Status>()>& check,
             Nanos timeout, const std::function<void()>& leave, const std::string& what) {
  constexpr auto kLook = std::chrono::milliseconds(50);
  std::packaged_task<T()> task(std::move(call));
  std::future<T> result = task.get_future();
  std::thread(std::move(task)).detach();
  const Nanos start = Now();
  while (result.wait_for(kLook) != std::future_status::ready) {
    std::optional<Status> failure = check();
    // What it says itself goes first: it may be the reason why others fail.
    if (failure && result.wait_for(kLook) == std::future_status::ready) break;
    if (!failure && Now() - start > timeout)
      failure = Status(Kind::kTimeout,
                       what + " did not finish within " + std::to_string(timeout / kSecond) + " s");
    if (!failure) continue;
    leave();
    throw Error(*failure);
  }
  return result.get();
}

}  // namespace gradred::comm
