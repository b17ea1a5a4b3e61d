// The Python module gradred._core. Native threads never touch a Python object: what Python owns
// (inputs of a pending batch) is kept and freed by Python's threads, and log lines leave through a
// queue.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/status.h"
#include "comm/world.h"
#include "engine/engine.h"

namespace gradred::bindings {

namespace py = pybind11;

// One a source file.
void BindErrors(py::module_& m);
void BindLog(py::module_& m);
void BindArrays(py::module_& m);
void BindWorld(py::module_& m);
void BindEngine(py::module_& m);
void BindHandle(py::module_& m);
void BindLeave(py::module_& m);
void BindTimeline(py::module_& m);
void BindPde(py::module_& m);
void BindDiff(py::module_& m);

// How long a wait of this thread stays away from Python before it looks for signals. Python runs
// their handlers on its main thread alone; others stay away, since a thread that asks for the GIL
// while the interpreter is finalized dies there.
inline std::chrono::nanoseconds SignalSlice() {
  static const auto main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  if (PyThread_get_thread_ident() != main_thread) return std::chrono::hours(1);
  return std::chrono::milliseconds(100);
}

// Holding the GIL: runs the handlers of signals that came meanwhile; throws what they raise
// (KeyboardInterrupt).
inline void CheckSignals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Runs `function` on a thread of its own. It owns all it uses and touches no Python object.
template <class Function>
auto StartOnThread(Function function) -> std::shared_future<decltype(function())> {
  std::packaged_task<decltype(function())()> task(std::move(function));
  auto future = task.get_future().share();
  std::thread(std::move(task)).detach();
  return future;
}

// Waits without the GIL, so that KeyboardInterrupt gets through; the thread then goes on by itself.
template <class T>
T WaitInterruptible(const std::shared_future<T>& future) {
  const auto slice = SignalSlice();
  for (;;) {
    {
      py::gil_scoped_release release;
      if (future.wait_for(slice) == std::future_status::ready) break;
    }
    CheckSignals();
  }
  return future.get();
}

// A spec from Python's values, see _core.pyi. Throws kInvalidArgument for a name that is not known.
std::shared_ptr<engine::DomainSpec> MakeSpec(const std::string& name, int process_set,
                                             const py::list& entries, std::vector<int> group_ends);

}  // namespace gradred::bindings
