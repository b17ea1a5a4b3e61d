#include "arrays.h"

#include "base/page_pool.h"

namespace gradred::bindings {
namespace {

// The C interface of DLPack, version 0: https://dmlc.github.io/dlpack/latest/c_api.html
struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: C-contiguous
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};
constexpr int kDLCpu = 1, kDLCudaHost = 3;
constexpr int kDLInt = 0, kDLUint = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6;

// The element type's name, or an empty string for one that has none here.
std::string NameOf(DLDataType t) {
  if (t.lanes != 1) return "";
  const std::string bits = std::to_string(t.bits);
  switch (t.code) {
    case kDLInt:
      return "int" + bits;
    case kDLUint:
      return "uint" + bits;
    case kDLFloat:
      return "float" + bits;
    case kDLBfloat:
      return t.bits == 16 ? "bfloat16" : "";
    case kDLBool:
      return t.bits == 8 ? "bool" : "";
    default:
      return "";
  }
}

// Takes the tensor out of its capsule. See the Python side of DLPack's specification: a capsule is
// consumed once, and the consumer calls the deleter.
py::tuple FromDlpack(const py::capsule& capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    throw Error(Kind::kInvalidArgument, "not a fresh DLPack capsule named 'dltensor'");
  }
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& t = managed->tensor;
  if (t.device.device_type != kDLCpu && t.device.device_type != kDLCudaHost) {
    throw Error(Kind::kUnsupported, "a DLPack tensor on device type " +
                                        std::to_string(t.device.device_type) +
                                        ": expected one in host memory; copy it to the host first");
  }
  const std::string name = NameOf(t.dtype);
  DType dtype;
  if (!DTypeFromName(name, &dtype)) {
    throw Error(Kind::kInvalidArgument,
                "a DLPack tensor with element type code " + std::to_string(t.dtype.code) + ", " +
                    std::to_string(t.dtype.bits) + " bits, " + std::to_string(t.dtype.lanes) +
                    " lanes, which has no reduction");
  }
  const py::ssize_t itemsize = DTypeSize(dtype);
  std::vector<py::ssize_t> shape(t.shape, t.shape + t.ndim), strides(t.ndim);
  py::ssize_t next = itemsize;
  for (int d = t.ndim - 1; d >= 0; --d) {
    strides[d] = t.strides != nullptr ? t.strides[d] * itemsize : next;
    next *= shape[d];
  }
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  const py::capsule owner(managed, [](void* p) {
    auto* m = static_cast<DLManagedTensor*>(p);
    if (m->deleter != nullptr) m->deleter(m);
  });
  return py::make_tuple(py::array(NumpyType(dtype), shape, strides,
                                  static_cast<char*>(t.data) + t.byte_offset, owner),
                        name);
}

}  // namespace

std::shared_ptr<Buffer> Buffer::Make(int64_t nbytes) {
  void* data = PagePool::The().Take(nbytes);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<Buffer>(new Buffer(data, nbytes));
}

Buffer::~Buffer() { PagePool::The().Give(data_, nbytes_); }

py::dtype NumpyType(DType dtype) {
  return py::dtype(dtype == DType::kBfloat16 ? "uint16" : DTypeName(dtype));
}

py::array WrapBuffer(const std::shared_ptr<Buffer>& buffer, DType dtype,
                     const engine::Shape& shape) {
  const py::capsule owner(new std::shared_ptr<Buffer>(buffer),
                          [](void* p) { delete static_cast<std::shared_ptr<Buffer>*>(p); });
  return py::array(NumpyType(dtype), std::vector<py::ssize_t>(shape.begin(), shape.end()),
                   buffer->data(), owner);
}

void BindArrays(py::module_& m) { m.def("from_dlpack", &FromDlpack, py::arg("capsule")); }

}  // namespace gradred::bindings
