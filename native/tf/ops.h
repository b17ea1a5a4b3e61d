// The ops by file.
#pragma once

#include <vector>

#include "kernel_support.h"

namespace gradred::tf {

#define GRADRED_TF_TYPES                                                                     \
  "{bool, uint8, uint16, uint32, uint64, int8, int16, int32, int64, half, bfloat16, float, " \
  "double}"
constexpr char kTensorType[] = "T: " GRADRED_TF_TYPES;
constexpr char kTensorTypes[] = "T: list(" GRADRED_TF_TYPES ") >= 1";
constexpr char kInputTypes[] = "Tin: list(" GRADRED_TF_TYPES ") >= 0";
constexpr char kOutputTypes[] = "Tout: list(" GRADRED_TF_TYPES ") >= 0";
#undef GRADRED_TF_TYPES

const std::vector<OpDefinition>&
GraphOps();  // GradredBegin, GradredSubmit, GradredJoin, GradredWait, ...
const std::vector<OpDefinition>& EagerOps();     // GradredRunList
const std::vector<OpDefinition>& AllToAllOps();  // GradredAllToAll
const std::vector<OpDefinition>& DiffOps();      // GradredDiff, GradredToken...
const std::vector<OpDefinition>& WorldOps();     // GradredWorld

}  // namespace gradred::tf
