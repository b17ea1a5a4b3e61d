#include "shapes.h"

namespace gradred::tf {
namespace {

class ShapeHandle {
 public:
  explicit ShapeHandle(TF_ShapeHandle* handle) : handle_(handle) {}
  ~ShapeHandle() { TheApi().DeleteShapeHandle(handle_); }
  ShapeHandle(const ShapeHandle&) = delete;
  operator TF_ShapeHandle*() { return handle_; }

 private:
  TF_ShapeHandle* const handle_;
};

}  // namespace

void SetShapeOfInput(TF_ShapeInferenceContext* context, int output, TF_Status* status) {
  ShapeHandle shape(TheApi().NewShapeHandle());
  TheApi().ShapeInferenceContextGetInput(context, 0, shape, status);
  if (TheApi().GetCode(status) == TF_OK)
    TheApi().ShapeInferenceContextSetOutput(context, output, shape, status);
}

void ShapeOfInput(TF_ShapeInferenceContext* context, TF_Status* status) {
  SetShapeOfInput(context, 0, status);
}

void SetScalar(TF_ShapeInferenceContext* context, int output, TF_Status* status) {
  ShapeHandle scalar(TheApi().ShapeInferenceContextScalar(context));
  TheApi().ShapeInferenceContextSetOutput(context, output, scalar, status);
}

void ShapeScalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  SetScalar(context, 0, status);
}

void ShapesUnknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  TheApi().ShapeInferenceContextSetUnknownShape(context, status);
}

}  // namespace gradred::tf
