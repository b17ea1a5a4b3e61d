#include "comm/mpi/mpi_process.h"

#include <pthread.h>

#include <cstdlib>
#include <utility>

#include "base/status.h"

namespace gradred::comm::mpi {

Process& Process::Get() {
  static Process* process = new Process;  // outlives threads and exit handlers
  return *process;
}

Process::Process() {
  pthread_atfork(nullptr, nullptr, [] { Get().End(); });
}

void Process::ThrowIfOver() const {
  if (over())
    throw Error(Kind::kNotInitialized,
                "MPI is not called any more in this process: it is a forked child, or an engine "
                "error came before; "
                "start a new process");
}

// Note [MPI_Finalize]
// MPI cannot be initialised twice, but an engine can: shutdown() and init() again is right use. So
// closing a fabric frees its communicators, and MPI_Finalize follows when the process exits, if we
// called MPI_Init_thread and the last fabric was closed properly. If it was not, the launcher must
// see a process that ended without MPI_Finalize and end the job: the other ranks may wait for this
// one for ever, and MPI_Finalize would wait for them.
void Process::FinalizeAtExit(std::function<void()> finalize) {
  finalize_ = std::move(finalize);
  std::atexit([] { Get().AtExit(); });
}

void Process::AtExit() {
  if (over() || !clean_) return;
  finalize_();
  End();
}

void Process::Bury(std::vector<char> memory) {
  std::lock_guard<std::mutex> lock(graveyard_mutex_);
  graveyard_.push_back(std::move(memory));
}

}  // namespace gradred::comm::mpi
