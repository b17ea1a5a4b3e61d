// Arithmetic of the stand-in of NCCL: every partial result is rounded to the type, and the order is
// nobody's business.
#pragma once

#include <cstddef>
#include <vector>

// ncclDataType_t and ncclRedOp_t.
constexpr int kInt8 = 0, kUint8 = 1, kInt32 = 2, kUint32 = 3, kInt64 = 4, kUint64 = 5, kFloat16 = 6,
              kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9;
constexpr int kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4;

size_t SizeOf(int type);  // 0: no such type

// out[i] = ins[0][i] op ins[1][i] ..., started with another rank from element to element. `scalar`,
// where not null, is of the type and multiplies every input first. kAvg: inputs times 1 / n. `out`
// may be an input.
void ReduceInputs(int type, int op, const void* scalar, const std::vector<const void*>& ins,
                  void* out, size_t count);
