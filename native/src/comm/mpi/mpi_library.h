// Which MPI library: the one that the process has, else one that fits the launcher; and which
// binary interface (ABI) it speaks. Nothing here initialises MPI.
#pragma once

#include <string>
#include <vector>

#include "comm/fabric.h"

namespace gradred::comm::mpi {

enum class AbiKind { kUnknown, kOpenMpi, kMpich, kStandard };
const char* AbiName(AbiKind kind);

struct Library {
  void* handle = nullptr;
  std::string path;
  std::string version;  // MPI_Get_library_version, its first line
  std::string
      family;  // "openmpi" or "mpich": whose launchers start it, whatever its ABI; "" unknown
  AbiKind abi = AbiKind::kUnknown;
  bool global = false;                          // its symbols are in the process's global scope
  bool initialized = false, finalized = false;  // when it was found

  // See Note [Symbols of an MPI in the global scope].
  void* Find(const char* symbol) const;     // null when absent
  void* Require(const char* symbol) const;  // throws kUnsupported naming library and symbol
  std::string Describe() const;             // "Open MPI v5.0.11 (/path/libmpi.so.40)"
};

// The MPI libraries in this process, whatever their file names and however they were loaded.
std::vector<Library> LoadedLibraries();

// options.mpi_library if given; else the loaded one, initialised ones first; else one that fits
// `launcher`, searched in its installation, in options.prefix/lib, and by the dynamic linker. A
// library that is opened here stays open. Throws kUnsupported with all that was tried,
// kInvalidArgument when another library than options.mpi_library is in use.
Library ChooseLibrary(const WorldOptions& options, const LauncherInfo& launcher);

}  // namespace gradred::comm::mpi
