// Registers the ops when tf.load_op_library opens this library.
#include "base/status.h"
#include "domains.h"
#include "engine/engine.h"
#include "kernel_support.h"
#include "ops.h"

namespace gradred::tf {
namespace {

Status load_status;

__attribute__((constructor)) void RegisterAll() {
  try {
    for (const auto* ops : {&GraphOps(), &EagerOps(), &AllToAllOps(), &DiffOps(), &WorldOps()})
      for (const OpDefinition& op : *ops) Register(op);
  } catch (...) {
    load_status = CurrentException();  // no exception may leave dlopen
  }
}

}  // namespace
}  // namespace gradred::tf

// Null when the ops are there, else the reason; for gradred.tensorflow.
extern "C" __attribute__((visibility("default"))) const char* gradred_tf_load_error() {
  static const std::string text = gradred::tf::load_status.ToString();
  return gradred::tf::load_status.ok() ? nullptr : text.c_str();
}

// Gives up the next batch of a domain that eager mode runs: the other ranks learn `reason`.
extern "C" __attribute__((visibility("default"))) void gradred_tf_abandon(const char* key,
                                                                          const char* reason) {
  try {
    const auto engine = gradred::engine::GlobalOrNull();
    if (engine == nullptr) return;
    engine->Abandon(engine->Open(gradred::tf::SpecFor(key, "")), reason);
  } catch (...) {
    // The engine has failed, which the others know.
  }
}
