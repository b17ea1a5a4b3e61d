// Registers the ops when tf.load_op_library opens this library.
#include "base/log.h"
#include "base/status.h"
#include "kernel_support.h"
#include "ops.h"

namespace gradred::tf {
namespace {

Status load_status;

__attribute__((constructor)) void RegisterAll() {
  try {
    for (const OpDefinition& op : GraphOps()) Register(op);
    for (const OpDefinition& op : EagerOps()) Register(op);
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
