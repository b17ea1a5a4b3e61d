// Sparse matrices as operations of gradred.diff.
#pragma once

#include "diff/operation.h"

namespace gradred::sparse {

// Note [Patterns by number]
// Params of an operation are integers, so patterns have numbers, in a table of this process:
// sparse_pattern makes one, the others find it, and DropPattern takes it out when Python gives its
// object up. Operations keep the number alone. A pattern belongs to one context, whose worker alone
// uses it. Its solvers are in the table too, by their options: so a solve and its adjoint share
// what was set up.

// By name: sparse_pattern, sparse_assemble, sparse_product, sparse_outer, sparse_solve.
const std::map<std::string, diff::MakeOperation>& Operations();

// The ranks that a product with the pattern sends to or receives from. Any thread.
std::vector<int> PeersOf(int64_t number);

// Any thread.
void DropPattern(int64_t number);

}  // namespace gradred::sparse
