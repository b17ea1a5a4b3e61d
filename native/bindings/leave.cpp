// Note [Leaving after an engine error]
// MPI_Finalize would wait for peers that are gone, ours as well as mpi4py's, which runs when the
// interpreter is finalized. So the process leaves before: by a handler of exit(3), which knows the
// exit status and runs before all those registered earlier, or, if mpi4py is to finalize MPI, by
// Py_AtExit, which runs before mpi4py's and after Python's own atexit handlers and flushes.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "bindings.h"

namespace gradred::bindings {
namespace {

int status_before_finalize = 1;

[[noreturn]] void Leave(int status) {
  std::fflush(nullptr);
  _exit(status != 0 ? status : 1);
}

// `status`: of the process, used where it must leave before the interpreter tells.
void LeaveAtExit(bool before_finalize, int status) {
  if (before_finalize) {
    status_before_finalize = status;
    if (Py_AtExit([] { Leave(status_before_finalize); }) == 0) return;
    Leave(status);  // the interpreter's table of handlers is full
  }
  on_exit([](int exit_status, void*) { Leave(exit_status); }, nullptr);
}

}  // namespace

void BindLeave(py::module_& m) {
  m.def("leave_at_exit", &LeaveAtExit, py::arg("before_finalize"), py::arg("status"));
}

}  // namespace gradred::bindings
