// Compiles only where mpi_table.h and mpi_abi.h agree with a real mpi.h, and returns 0 where the
// rest does:
//   g++ -std=c++17 -I native/src -I DIR_OF_MPI_H [-DGRADRED_MPI_H='<mpi_abi.h>']
//   tests/native/mpi_abi_check.cpp
// Built by tests/mpi/test_native_mpi.py where an mpi.h is found; the only source of the project
// that includes one.
#ifndef GRADRED_MPI_H
#define GRADRED_MPI_H <mpi.h>
#endif
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include GRADRED_MPI_H

#include <cstdio>
#include <string_view>
#include <type_traits>

#include "comm/mpi/mpi_abi.h"

namespace {

using namespace gradred::comm::mpi;

#if defined(OPEN_MPI)
using Abi = OpenMpiAbi;
#elif defined(MPI_ABI_VERSION) && MPI_ABI_VERSION >= 1
using Abi = StandardAbi;
#elif defined(MPICH_VERSION) || defined(I_MPI_VERSION) || defined(MVAPICH_VERSION)
using Abi = MpichAbi;
#else
#error "an mpi.h of an unknown ABI"
#endif

// --- Types: a handle has the size and the nature of ours, a status the layout of ours
// ------------------------------------------

#define GRADRED_X(kind)                                                                       \
  static_assert(sizeof(MPI_##kind) == sizeof(Abi::kind), "MPI_" #kind ": size");              \
  static_assert(std::is_pointer_v<MPI_##kind> == std::is_pointer_v<Abi::kind>, "MPI_" #kind); \
  static_assert(std::is_pointer_v<MPI_##kind> || std::is_same_v<MPI_##kind, int>, "MPI_" #kind);
GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X

static_assert(sizeof(MPI_Status) == sizeof(Abi::Status) &&
                  alignof(MPI_Status) == alignof(Abi::Status),
              "MPI_Status");
static_assert(offsetof(MPI_Status, MPI_SOURCE) == offsetof(Abi::Status, source), "MPI_SOURCE");
static_assert(offsetof(MPI_Status, MPI_TAG) == offsetof(Abi::Status, tag), "MPI_TAG");
static_assert(offsetof(MPI_Status, MPI_ERROR) == offsetof(Abi::Status, error), "MPI_ERROR");

// --- Functions: the parameters of the table, read with the real types, are those of the header
// -----------------------------------

namespace signatures {
#define GRADRED_X(kind) using kind = MPI_##kind;
GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
using Status = MPI_Status;
#define GRADRED_X(name, parameters) \
  static_assert(std::is_same_v<decltype(MPI_##name), int parameters>, "MPI_" #name);
GRADRED_MPI_FUNCTIONS(GRADRED_X)
#undef GRADRED_X
}  // namespace signatures

// --- Integers
// ------------------------------------------------------------------------------------------------------------------

#define GRADRED_X(name, mpi, openmpi, mpich, standard) static_assert(int(mpi) == Abi::name, #mpi);
GRADRED_MPI_INTEGERS(GRADRED_X)
#undef GRADRED_X

// --- Predefined handles
// -----------------------------------------------------------------------------------------------------

namespace handles {
#if defined(OPEN_MPI)
// The header names a variable of the library: let it give us the name.
#undef OMPI_PREDEFINED_GLOBAL
#define OMPI_PREDEFINED_GLOBAL(type, global) #global
constexpr bool Same(Symbol ours, std::string_view theirs) { return ours.name == theirs; }
#else
// The header casts a number to the handle type, as in ((MPI_Comm)0x101), and C++ has no constant
// expression of that form for pointers. In here the handle types are integers.
#define GRADRED_X(kind) using MPI_##kind = std::uintptr_t;
GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
constexpr bool Same(Number ours, std::uintptr_t theirs) { return ours.value == theirs; }
template <class Handle>
constexpr bool Same(Handle ours, std::uintptr_t theirs) {
  return static_cast<std::uintptr_t>(ours) == theirs;
}
#endif
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) \
  static_assert(Same(Abi::name, mpi), #mpi);
GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
}  // namespace handles

}  // namespace

int main() {
  int wrong = 0;
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard)    \
  if (reinterpret_cast<std::uintptr_t>(mpi) != Abi::name.value) \
    ++wrong, std::printf("%s differs\n", #mpi);
  GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X
  return wrong;
}
