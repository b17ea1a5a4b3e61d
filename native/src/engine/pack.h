// Between tensors and their bytes in a group's layout. Pure functions of their arguments; any
// thread.
#pragma once

#include <cstdint>

#include "engine/plan.h"
#include "engine/spec.h"
#include "reduce/convert.h"

namespace gradred::engine {

// Elements [first, first + count) of a tensor, cast and scaled for the wire, to `at`, where the
// first of them lies. `input`: the whole tensor; null (absent, or a rank that has joined): the
// value that changes nothing. `counts` is added to.
void PackElements(const EntrySpec& entry, const MemberPlan& member, const void* input,
                  int64_t first, int64_t count, int set_size, void* at,
                  reduce::ConvertCounts* counts);

// All of a tensor to its place in the layout that starts at `base`, and zeros behind it up to where
// the next one starts: nothing that was left in memory reaches a network.
void PackMember(const EntrySpec& entry, const MemberPlan& member, const void* input, int set_size,
                void* base, reduce::ConvertCounts* counts);

// The way back, from reduced bytes: divided where it is an average (`average_residual`: of the
// communicator), scaled and cast. `counts`, of half wires alone, is added to.
void UnpackElements(const EntrySpec& entry, const MemberPlan& member, void* output, int64_t first,
                    int64_t count, int set_size, double average_residual, const void* at,
                    reduce::ConvertCounts* counts);

}  // namespace gradred::engine
