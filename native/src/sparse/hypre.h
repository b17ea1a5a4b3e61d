// HYPRE's BoomerAMG as a preconditioner. The library is opened when it is first asked for; nothing
// of it is needed to build.
#pragma once

#include <memory>
#include <string>

#include "sparse/solve.h"

namespace gradred::sparse {

// Opens the library, if that was not tried before. Returns why it cannot be used; empty: it can.
// `path`: of the library; empty: the names under which distributions install it.
std::string FindHypre(const std::string& path);

// Sets up the hierarchy of coarser matrices (Henson and Yang, doi:10.1016/S0168-9274(01)00115-5).
// Apply is one V-cycle, or the transposed one with the same hierarchy. `symmetric`: the matrix is,
// and so is the cycle. Collective; needs an MPI communicator of the channel, and FindHypre to have
// found HYPRE, whose calls block in MPI: neither deadlines nor an abort of the job interrupt them.
//
// Note [Freeing what HYPRE holds]
// HYPRE frees MPI communicators with a hierarchy, which is collective, and what is returned here is
// given up at another moment and on any thread on each rank: when Python or TensorFlow collects its
// owner. So the channel keeps the hierarchies; this call frees those that all ranks have given up,
// before it sets up another one. What a channel still has at its end is left.
std::unique_ptr<Preconditioner> MakeBoomerAmg(diff::Channel& channel, const Pattern& pattern,
                                              const double* values, bool symmetric);

// Hierarchies in memory, those given up and not freed yet among them. Any thread.
int64_t CountHierarchies();

}  // namespace gradred::sparse
