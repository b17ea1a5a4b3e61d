// gradred::Error becomes the exception of the same name in gradred.errors.
#include "bindings.h"

namespace gradred::bindings {
namespace {

bool MakesException(const py::object& frame) {
  if (frame.attr("f_code").attr("co_name").cast<std::string>() != "__init__") return false;
  const py::object self = frame.attr("f_locals").attr("get")("self");
  return PyObject_IsInstance(self.ptr(), PyExc_BaseException) == 1;
}

// A handler of Ctrl-C. In C++, since Python code in it would be interrupted anew by what it puts
// off. See Note [Ctrl-C while an exception is made] in gradred/tensorflow/interrupt.py.
void Interrupt(int /*number*/, const py::object& frame) {
  if (!frame.is_none() && MakesException(frame)) {
    PyErr_SetInterrupt();  // Python calls this again, behind some more instructions
    return;
  }
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw py::error_already_set();
}

}  // namespace

void BindErrors(py::module_& m) {
  m.def("interrupt", &Interrupt, py::arg("number"), py::arg("frame"),
        "A handler of Ctrl-C: Python's own, put off while an exception is made.");
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      // A Ctrl-C that reaches all ranks is their end; not that another one has given up for it.
      if (PyErr_CheckSignals() != 0) return;
      const py::object type = py::module_::import("gradred.errors").attr(KindName(error.kind()));
      py::set_error(type, error.what());
    }
  });
}

}  // namespace gradred::bindings
