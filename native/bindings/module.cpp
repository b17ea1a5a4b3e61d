#include "bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native engine of gradred. Private: see gradred for the API.";
  using namespace gradred::bindings;
  BindErrors(m);
  BindLog(m);
  BindArrays(m);
  BindWorld(m);
  BindEngine(m);
  BindHandle(m);
  BindLeave(m);
  BindTimeline(m);
  BindPde(m);
  BindDiff(m);
}
