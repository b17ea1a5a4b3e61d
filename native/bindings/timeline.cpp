// The timeline's file of this rank; which ranks record, and with which clock, is agreed on by
// gradred/timeline.py.
#include "base/timeline.h"

#include "bindings.h"

namespace gradred::bindings {
namespace {

void Start(const std::string& path, int rank, int size, const std::string& host, Nanos origin,
           Nanos clock_offset, Nanos clock_uncertainty, bool mark_rounds, bool chunks) {
  timeline::Options options;
  options.path = path;
  options.rank = rank;
  options.size = size;
  options.host = host;
  options.origin = origin;
  options.clock_offset = clock_offset;
  options.clock_uncertainty = clock_uncertainty;
  options.mark_rounds = mark_rounds;
  options.chunks = chunks;
  py::gil_scoped_release release;
  timeline::Start(options);
}

}  // namespace

void BindTimeline(py::module_& m) {
  m.def("timeline_now", &Now);
  m.def("timeline_start", &Start, py::arg("path"), py::arg("rank"), py::arg("size"),
        py::arg("host"), py::arg("origin"), py::arg("clock_offset"), py::arg("clock_uncertainty"),
        py::arg("mark_rounds"), py::arg("chunks"));
  m.def("timeline_stop", &timeline::Stop, py::call_guard<py::gil_scoped_release>());
  m.def("timeline_path", &timeline::Path);
}

}  // namespace gradred::bindings
