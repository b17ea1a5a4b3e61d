#include "diff/operation.h"

namespace gradred::diff {

int64_t CountOf(const Dims& shape) {
  int64_t count = 1;
  for (const int64_t d : shape) count *= d;
  return count;
}

std::string ToText(const Dims& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Dims Input::row_shape() const {
  return shape.empty() ? Dims() : Dims(shape.begin() + 1, shape.end());
}

int64_t Input::row_nbytes() const { return CountOf(row_shape()) * DTypeSize(dtype); }

std::vector<int64_t> Input::Int64s() const {
  if (dtype != DType::kInt64)
    throw Error(Kind::kInternal, std::string("expected int64 numbers, got ") + DTypeName(dtype));
  const auto* values = static_cast<const int64_t*>(data);
  return {values, values + count()};
}

const std::map<std::string, MakeOperation>& Operations() {
  static const auto* operations = new std::map<std::string, MakeOperation>{
      {"allgather", &MakeAllGather},
      {"allreduce", &MakeAllReduce},
      {"alltoall", &MakeAllToAll},
      {"barrier", &MakeBarrier},
      {"broadcast", &MakeBroadcast},
      {"check_replicated", &MakeCheckReplicated},
      {"gather", &MakeGather},
      {"halo", &MakeHalo},
      {"halo_adjoint", &MakeHaloAdjoint},
      {"psum", &MakeAllReduce},
      {"recv", &MakeRecv},
      {"reduce", &MakeReduce},
      {"reduce_scatter", &MakeReduceScatter},
      {"repartition", &MakeRepartition},
      {"replicate", &MakeReplicate},
      {"scan", &MakeScan},
      {"scatter", &MakeScatter},
      {"send", &MakeSend},
      {"sendrecv", &MakeSendRecv},
  };
  return *operations;
}

}  // namespace gradred::diff
