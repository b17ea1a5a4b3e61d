// The contexts of gradred.diff.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diff/context.h"

namespace gradred::bindings {
namespace {

void OpenContext(int id, const std::string& name, std::vector<int> members, int checks,
                 double stall_warn_s, double stall_fail_s, double transport_timeout_s) {
  const auto nanos = [](double seconds) { return static_cast<Nanos>(seconds * kSecond); };
  diff::ContextOptions options;
  options.id = id;
  options.name = name;
  options.members = std::move(members);
  options.checks = checks;
  options.limits = {nanos(stall_warn_s), nanos(stall_fail_s), nanos(transport_timeout_s)};
  const auto engine = engine::Global();
  py::gil_scoped_release release;
  diff::OpenContext(engine->world(), std::move(options));
}

}  // namespace

void BindDiff(py::module_& m) {
  m.def("diff_open", &OpenContext, py::arg("id"), py::arg("name"), py::arg("members"),
        py::arg("checks"), py::arg("stall_warn_s"), py::arg("stall_fail_s"),
        py::arg("transport_timeout_s"));
  m.def("diff_close", &diff::CloseContext, py::arg("id"), py::arg("reason"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace gradred::bindings
