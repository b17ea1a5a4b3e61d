// The contexts of gradred.diff.
#include <pybind11/stl.h>

#include "bindings.h"
#include "diff/context.h"
#include "diff/halo.h"
#include "sparse/hypre.h"
#include "sparse/operations.h"

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

// What Python needs to know of a halo plan; checks it.
py::dict HaloPlan(const std::vector<int64_t>& params) {
  const diff::HaloPlan plan = diff::ReadHaloPlan(params);
  const auto shape = [&](const diff::GridShape& s) {
    return py::tuple(py::cast(std::vector<int64_t>(s.end() - plan.dimensions(), s.end())));
  };
  py::dict result;
  result["interior"] = shape(plan.interior());
  result["padded"] = shape(plan.padded());
  result["peers"] = plan.Traffic({{}}, false).peers;
  result["adjoint_peers"] = plan.Traffic({{}}, true).peers;
  return result;
}

}  // namespace

void BindDiff(py::module_& m) {
  m.def("diff_open", &OpenContext, py::arg("id"), py::arg("name"), py::arg("members"),
        py::arg("checks"), py::arg("stall_warn_s"), py::arg("stall_fail_s"),
        py::arg("transport_timeout_s"));
  m.def("diff_close", &diff::CloseContext, py::arg("id"), py::arg("reason"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "diff_refuse",
      [](int id, const std::string& what, const std::string& why, bool collective) {
        diff::FindContext(id)->Refuse(what, why, collective);
      },
      py::arg("id"), py::arg("what"), py::arg("why"), py::arg("collective"),
      py::call_guard<py::gil_scoped_release>());
  m.def("diff_halo_plan", &HaloPlan, py::arg("params"));
  m.def("sparse_peers", &sparse::PeersOf, py::arg("number"));
  m.def("sparse_drop_pattern", &sparse::DropPattern, py::arg("number"));
  m.def("sparse_hierarchies", &sparse::CountHierarchies);
}

}  // namespace gradred::bindings
