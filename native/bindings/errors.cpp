// gradred::Error becomes the exception of the same name in gradred.errors.
#include "bindings.h"

namespace gradred::bindings {

void BindErrors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const py::object type = py::module_::import("gradred.errors").attr(KindName(error.kind()));
      py::set_error(type, error.what());
    }
  });
}

}  // namespace gradred::bindings
