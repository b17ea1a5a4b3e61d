// Forked processes that play ranks.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "testing.h"

namespace testing {

struct ProcessEnd {
  int status = 0;      // as waitpid gives it
  std::string output;  // "" when the body returned; else the exception's text
  bool ok() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
};

// Runs body(rank) in `size` children and waits for them; at the time-out it kills those that are
// left and throws with what the others have said. Call it while this process has one thread.
inline std::vector<ProcessEnd> RunAndCollect(int size, const std::function<void(int)>& body,
                                             gradred::Nanos timeout = 100 * gradred::kSecond) {
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  std::vector<ProcessEnd> ends(static_cast<size_t>(size));
  std::fflush(stdout);
  for (int rank = 0; rank < size; ++rank) {
    int ends_of_pipe[2];
    if (pipe(ends_of_pipe) != 0) throw Failure("pipe failed");
    const pid_t pid = fork();
    if (pid < 0) throw Failure("fork failed");
    if (pid == 0) {
      close(ends_of_pipe[0]);
      std::string text;
      try {
        body(rank);
      } catch (const std::exception& e) {
        text = e.what();
      }
      size_t at = 0;
      while (at < text.size()) {
        const ssize_t n = write(ends_of_pipe[1], text.data() + at, text.size() - at);
        if (n <= 0) break;
        at += static_cast<size_t>(n);
      }
      std::fflush(stdout);
      _exit(text.empty() ? 0 : 1);
    }
    close(ends_of_pipe[1]);
    children.push_back({pid, ends_of_pipe[0]});
  }

  const gradred::Nanos deadline = gradred::Now() + timeout;
  std::string late;
  for (int rank = 0; rank < size; ++rank) {
    const Child& child = children[static_cast<size_t>(rank)];
    ProcessEnd& end = ends[static_cast<size_t>(rank)];
    while (true) {  // until the pipe closes: the process has ended
      const gradred::Nanos left = deadline - gradred::Now();
      pollfd entry{child.pipe, POLLIN, 0};
      const int ms = left > 0 ? static_cast<int>(left / gradred::kMillisecond) + 1 : 0;
      if (poll(&entry, 1, ms) <= 0) {
        if (gradred::Now() < deadline) continue;
        kill(child.pid, SIGKILL);
        late += " " + std::to_string(rank);
        break;
      }
      char bytes[4096];
      const ssize_t n = read(child.pipe, bytes, sizeof bytes);
      if (n <= 0) break;
      end.output.append(bytes, static_cast<size_t>(n));
    }
    close(child.pipe);
    while (waitpid(child.pid, &end.status, 0) < 0 && errno == EINTR) {
    }
  }
  if (!late.empty()) {
    std::string text = "time-out; killed ranks" + late;
    for (int rank = 0; rank < size; ++rank) {
      text += "\n  rank " + std::to_string(rank) + ": " + ends[static_cast<size_t>(rank)].output;
    }
    throw Failure(text);
  }
  return ends;
}

// The same, and all must have gone well.
inline void RunProcesses(int size, const std::function<void(int)>& body,
                         gradred::Nanos timeout = 100 * gradred::kSecond) {
  const std::vector<ProcessEnd> ends = RunAndCollect(size, body, timeout);
  std::string text;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    if (!ends[rank].ok()) {
      text += "\n  rank " + std::to_string(rank) + " (wait status " +
              std::to_string(ends[rank].status) + "): " + ends[rank].output;
    }
  }
  if (!text.empty()) throw Failure(std::to_string(size) + " processes:" + text);
}

}  // namespace testing
