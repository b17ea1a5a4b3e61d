// The problems of gradred.pde.
#include <pybind11/stl.h>

#include "bindings.h"
#include "pde/operation.h"

namespace gradred::bindings {
namespace {

int Open(const std::string& equation, const std::string& dtype_name, std::array<int64_t, 2> global,
         std::array<int64_t, 2> begin, std::array<int64_t, 2> count, std::array<int64_t, 2> largest,
         std::array<int, 4> neighbours, std::array<double, 2> spacing, double dt, int64_t steps,
         std::vector<pde::Node> sources, std::vector<pde::Node> receivers, int64_t layer,
         double layer_speed, int threads, int64_t memory_nbytes) {
  pde::Setting setting;
  setting.equation = equation == "heat" ? pde::Equation::kHeat : pde::Equation::kAcoustic;
  setting.block = {global, begin, count, neighbours};
  setting.largest_block = largest;
  setting.spacing = spacing;
  setting.dt = dt;
  setting.layer = layer;
  setting.layer_speed = layer_speed;
  setting.threads = threads;
  DType dtype;
  if (!DTypeFromName(dtype_name, &dtype))
    throw Error(Kind::kInvalidArgument, "unknown dtype " + dtype_name);
  return pde::OpenLoop(dtype, setting,
                       {steps, std::move(sources), std::move(receivers), memory_nbytes});
}

}  // namespace

void BindPde(py::module_& m) {
  m.def("pde_open", &Open, py::arg("equation"), py::arg("dtype"), py::arg("shape"),
        py::arg("begin"), py::arg("count"), py::arg("largest"), py::arg("neighbours"),
        py::arg("spacing"), py::arg("dt"), py::arg("steps"), py::arg("sources"),
        py::arg("receivers"), py::arg("layer"), py::arg("layer_speed"), py::arg("threads"),
        py::arg("memory_nbytes"));
  m.def("pde_close", &pde::CloseLoop, py::arg("id"));
  m.def(
      "pde_traffic",
      [](int id) {
        const pde::Traffic traffic = pde::TrafficOf(id);
        return std::make_tuple(traffic.messages, traffic.nbytes, traffic.time / 1e9);
      },
      py::arg("id"));
  m.def(
      "pde_keeping",
      [](int id) {
        const pde::Keeping keeping = pde::KeepingOf(id);
        return std::make_pair(keeping.segment, keeping.nbytes);
      },
      py::arg("id"));
}

}  // namespace gradred::bindings
