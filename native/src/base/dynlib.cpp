#include "base/dynlib.h"

#include <dlfcn.h>

#include "base/status.h"

namespace gradred {

DynLib DynLib::TryOpen(const std::vector<std::string>& names, std::string* why, bool global) {
  DynLib lib;
  for (const std::string& name : names) {
    lib.handle_ = dlopen(name.c_str(), RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (lib.handle_) {
      lib.name_ = name;
      return lib;
    }
    if (why) {
      const char* reason = dlerror();
      *why += (why->empty() ? "" : "; ") + std::string(reason ? reason : name);
    }
  }
  return lib;
}

DynLib DynLib::Open(const std::vector<std::string>& names, bool global) {
  std::string why;
  DynLib lib = TryOpen(names, &why, global);
  if (!lib) throw Error(Kind::kUnsupported, "cannot open a library: " + why);
  return lib;
}

void* DynLib::Find(const char* symbol) const { return handle_ ? dlsym(handle_, symbol) : nullptr; }

void* DynLib::Require(const char* symbol) const {
  void* found = Find(symbol);
  if (!found) throw Error(Kind::kUnsupported, name_ + " lacks the symbol " + symbol);
  return found;
}

}  // namespace gradred
