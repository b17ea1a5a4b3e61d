// Memory that crosses between the engine and NumPy.
#pragma once

#include <pybind11/numpy.h>

#include <memory>

#include "bindings.h"

namespace gradred::bindings {

// Made and filled without the GIL, seen by Python as an array. From the pool of pages.
class Buffer {
 public:
  // Null when there is no memory.
  static std::shared_ptr<Buffer> Make(int64_t nbytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() { return data_; }

 private:
  Buffer(void* data, int64_t nbytes) : data_(data), nbytes_(nbytes) {}
  void* const data_;
  const int64_t nbytes_;
};

// NumPy's type with the same bytes: uint16 for bfloat16.
py::dtype NumpyType(DType dtype);

// A writable C-contiguous array over the buffer, which it keeps alive.
py::array WrapBuffer(const std::shared_ptr<Buffer>& buffer, DType dtype,
                     const engine::Shape& shape);

}  // namespace gradred::bindings
