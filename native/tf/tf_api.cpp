#include "tf_api.h"

#include <dlfcn.h>

#include <string>

#include "base/status.h"

namespace gradred::tf {
namespace {

Api Load() {
  // libtensorflow_framework and not libtensorflow_cc: in some versions both define these functions,
  // with registries of their own.
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr)
    throw Error(Kind::kUnsupported,
                "libtensorflow_framework.so.2 is not loaded: import tensorflow first");
  Api api;
#define GRADRED_TF_FIND(type, name, arguments)                                       \
  api.name = reinterpret_cast<type(*) arguments>(dlsym(library, "TF_" #name));       \
  if (api.name == nullptr)                                                           \
    throw Error(Kind::kUnsupported, "this TensorFlow lacks the C function TF_" #name \
                                    "; gradred needs TensorFlow 2.15 or newer");
  GRADRED_TF_FUNCTIONS(GRADRED_TF_FIND)
#undef GRADRED_TF_FIND
  return api;
}

}  // namespace

const Api& TheApi() {
  static const Api api = Load();
  return api;
}

}  // namespace gradred::tf
