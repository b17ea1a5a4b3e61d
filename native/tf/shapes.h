// Shape functions of the ops.
#pragma once

#include "tf_api.h"

namespace gradred::tf {

// Output 0 has the shape of input 0.
void ShapeOfInput(TF_ShapeInferenceContext* context, TF_Status* status);
// Of an output.
void SetShapeOfInput(TF_ShapeInferenceContext* context, int output, TF_Status* status);
void SetScalar(TF_ShapeInferenceContext* context, int output, TF_Status* status);
// Output 0 is a scalar.
void ShapeScalar(TF_ShapeInferenceContext* context, TF_Status* status);
// Nothing is known of any output.
void ShapesUnknown(TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace gradred::tf
