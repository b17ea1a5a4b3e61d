// Compiled, not run, by test_c_api.py: our declarations are those of an installed TensorFlow's
// headers.
#define GRADRED_TF_OFFICIAL_HEADERS
#include <type_traits>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"
#include "tf_api.h"

#define GRADRED_CHECK(type, name, arguments) \
  static_assert(std::is_same_v<decltype(&TF_##name), type(*) arguments>, "TF_" #name);
GRADRED_TF_FUNCTIONS(GRADRED_CHECK)

// The numbers that tf_api.h writes down.
static_assert(TF_FLOAT == 1 && TF_DOUBLE == 2 && TF_INT32 == 3 && TF_UINT8 == 4 && TF_INT16 == 5 &&
              TF_INT8 == 6 && TF_INT64 == 9 && TF_BOOL == 10 && TF_BFLOAT16 == 14 &&
              TF_UINT16 == 17 && TF_HALF == 19 && TF_UINT32 == 22 && TF_UINT64 == 23);
static_assert(TF_OK == 0 && TF_INVALID_ARGUMENT == 3 && TF_DEADLINE_EXCEEDED == 4 &&
              TF_RESOURCE_EXHAUSTED == 8 && TF_FAILED_PRECONDITION == 9 && TF_ABORTED == 10 &&
              TF_UNIMPLEMENTED == 12 && TF_INTERNAL == 13 && TF_UNAVAILABLE == 14);
