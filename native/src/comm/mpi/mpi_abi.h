// The three binary interfaces of MPI as traits, and the functions and predefined handles of one
// library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/mpi/mpi_library.h"
#include "comm/mpi/mpi_table.h"

namespace gradred::comm::mpi {

// How an ABI gives a predefined handle (or address): as the address of a variable of the library,
// or as a number. In the MPICH ABI handles are numbers of a type of their own, and the value is the
// handle.
struct Symbol {
  const char* name;
};
struct Number {
  std::uintptr_t value;
};
template <class Handle>
Handle Resolve(const Library& library, Symbol symbol) {
  return static_cast<Handle>(library.Require(symbol.name));
}
template <class Handle>
Handle Resolve(const Library&, Number number) {
  return reinterpret_cast<Handle>(number.value);
}
template <class Handle>
Handle Resolve(const Library&, Handle handle) {
  return handle;
}

// Handles are pointers to structures of the library. Open MPI 1.7 to 5, Spectrum MPI.
struct OpenMpiAbi {
  static constexpr AbiKind kKind = AbiKind::kOpenMpi;
#define GRADRED_X(kind) using kind = struct OpenMpi##kind*;
  GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
  struct Status {
    int source, tag, error, cancelled;
    size_t count;
  };
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) static constexpr Symbol name{openmpi};
  GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(name, mpi, openmpi, mpich, standard) static constexpr int name = openmpi;
  GRADRED_MPI_INTEGERS(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard) static constexpr Number name{openmpi};
  GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X
};

// Handles are ints. MPICH 3.1 to 5, Intel MPI, Cray MPICH, MVAPICH. A scoped enumeration over int
// is passed as an int is, and keeps a communicator from passing for a datatype.
struct MpichAbi {
  static constexpr AbiKind kKind = AbiKind::kMpich;
#define GRADRED_X(kind) enum class kind : int {};
  GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
  struct Status {
    int count_low, count_high_and_cancelled, source, tag, error;
  };
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) static constexpr kind name{mpich};
  GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(name, mpi, openmpi, mpich, standard) static constexpr int name = mpich;
  GRADRED_MPI_INTEGERS(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard) static constexpr Number name{mpich};
  GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X
};

// Handles are pointers whose predefined values are small numbers. MPI 5.0, section "Application
// Binary Interface".
struct StandardAbi {
  static constexpr AbiKind kKind = AbiKind::kStandard;
#define GRADRED_X(kind) using kind = struct Standard##kind*;
  GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
  struct Status {
    int source, tag, error, internal[5];
  };
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) static constexpr Number name{standard};
  GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(name, mpi, openmpi, mpich, standard) static constexpr int name = standard;
  GRADRED_MPI_INTEGERS(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard) static constexpr Number name{standard};
  GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X
};

// One library's functions as pointers of the ABI's own types, and its predefined handles:
// api.Isend(..., api.byte, ...).
template <class Abi>
struct Api {
#define GRADRED_X(kind) using kind = typename Abi::kind;
  GRADRED_MPI_KINDS(GRADRED_X)
#undef GRADRED_X
  using Status = typename Abi::Status;

#define GRADRED_X(name, parameters) int(*name) parameters;
  GRADRED_MPI_FUNCTIONS(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) kind name;
  GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard) type* name;
  GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X

  // Throws kUnsupported naming what the library lacks.
  explicit Api(const Library& library) {
#define GRADRED_X(name, parameters) \
  name = reinterpret_cast<decltype(name)>(library.Require("MPI_" #name));
    GRADRED_MPI_FUNCTIONS(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(kind, name, mpi, openmpi, mpich, standard) \
  name = Resolve<kind>(library, Abi::name);
    GRADRED_MPI_HANDLES(GRADRED_X)
#undef GRADRED_X
#define GRADRED_X(type, name, mpi, openmpi, mpich, standard) \
  name = Resolve<type*>(library, Abi::name);
    GRADRED_MPI_ADDRESSES(GRADRED_X)
#undef GRADRED_X
  }
};

}  // namespace gradred::comm::mpi
