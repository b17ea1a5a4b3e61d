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
// and so is the cycle. `mpi_communicator`: bytes of the handle of an MPI communicator of the
// channel's ranks in their order, used by nothing else. Collective; needs FindHypre to have found
// it. Calls of HYPRE block in MPI: neither deadlines nor an abort of the job interrupt them.
std::unique_ptr<Preconditioner> MakeBoomerAmg(const std::string& mpi_communicator,
                                              const Pattern& pattern, const double* values,
                                              bool symmetric);

}  // namespace gradred::sparse
