// The reduction of one tensor over a context's ranks.
#pragma once

#include "diff/operation.h"
#include "reduce/layout.h"

namespace gradred::diff {

// kAverage: of floating dtypes. `out`: as many bytes as the input has; null: the result is not
// kept here.
void ReduceTensor(const Input& input, reduce::ReduceOp op, void* out, Channel& channel);

}  // namespace gradred::diff
