// Propagations as operations of gradred.diff.
#pragma once

#include <map>
#include <string>

#include "diff/operation.h"
#include "pde/time_loop.h"

namespace gradred::pde {

// A problem's time loop, which its forward nodes and the adjoints of these share. Of one context:
// its worker alone runs it. dtype: float32 or float64, of all tensors. Any thread; throws
// kInvalidArgument. Returns the loop's number in this process, 1 or more.
int OpenLoop(DType dtype, const Setting& setting, const Programme& programme);
// Operations under way keep it until they end.
void CloseLoop(int id);
Traffic TrafficOf(int id);
Keeping KeepingOf(int id);

// "propagate" [loop, keep]: coefficient, signals -> records, ticket (int64).
// "propagate_adjoint" [loop]: coefficient, signals, cotangents of the records, ticket -> cotangents
// of coefficient and signals.
const std::map<std::string, diff::MakeOperation>& Operations();

}  // namespace gradred::pde
