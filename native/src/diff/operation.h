// Seam: one kind of differentiable communication. Framework, threads, order and errors are the
// context's business.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "diff/channel.h"

namespace gradred::diff {

// Note [To add an operation]
// 1. A class here: what must agree over ranks (TermsOf), and what is sent (Run); its line in
//    Operations() of operation.cpp. Whatever is found out about a pattern (a halo plan, a
//    factorisation) is kept in the object: TensorFlow makes one a node, and it runs on one thread.
// 2. gradred/diff/<operation>.py: the function that users call, its static shapes, and its adjoint,
//    which is written with operations of gradred.diff, so that it can be differentiated again.
//    gradred/diff/node.py says how a node is made and its adjoint registered.
// 3. A line in gradred/diff/__init__.py, the table of docs/diff.md, and a case in
// tests/diff/cases.py,
//    which tries it in all modes.
// The TensorFlow op is one for all (native/tf/ops_diff.cpp): nothing is to be done there.

using Dims = std::vector<int64_t>;  // a tensor's shape
int64_t CountOf(const Dims& shape);
std::string ToText(const Dims& shape);  // "[3, 4]"

// A tensor that is read, row-major.
struct Input {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  Dims shape;

  int64_t count() const { return CountOf(shape); }
  int64_t nbytes() const { return count() * DTypeSize(dtype); }
  // Of the first dimension; a scalar is one row.
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_nbytes() const;
  Dims row_shape() const;
  // Its elements, of dtype int64. Throws kInternal.
  std::vector<int64_t> Int64s() const;
};
using Inputs = std::vector<Input>;

// One execution of an operation, as the framework hands it over. Used by the context's worker.
class Call {
 public:
  virtual ~Call() = default;
  virtual const Inputs& inputs() const = 0;
  // Memory for an output, from now on part of the result. Throws kUnsupported when there is none.
  virtual void* Output(int index, const Dims& shape) = 0;
  // The output is the input, without a copy.
  virtual void Forward(int index, int input) = 0;
  // Once, the last call. `keep`: somebody may still read or write its memory, for ever.
  virtual void Done(const Status& status, bool keep) = 0;
};

// What is agreed on before a collective operation runs.
struct Terms {
  std::string alike;             // what must be equal, as a reader of an error would say it
  std::vector<int64_t> numbers;  // this rank's own, for the others: at most kNumbers
};
constexpr int kNumbers = 6;
// [rank], the ranks' numbers; empty where they were not exchanged.
using Numbers = std::vector<std::vector<int64_t>>;

// What fails on all ranks alike, found from what all know: the context goes on.
class AgreedError : public Error {
 public:
  using Error::Error;
};

class Operation {
 public:
  virtual ~Operation() = default;
  // All ranks of the context run it at the same place in their order. False: messages of some.
  virtual bool collective() const { return true; }
  // Run needs the ranks' numbers. Else they are not exchanged, and a job may choose that terms are
  // compared in a context's first operations alone.
  virtual bool needs_numbers() const { return false; }
  // Throws Error for inputs that cannot be: then it fails on all ranks, with that text.
  virtual Terms TermsOf(const Inputs& inputs, const Channel& channel) const = 0;
  // Throws AgreedError, or Error for what ends the context.
  virtual void Run(Call& call, Channel& channel, const Numbers& numbers) = 0;
};

using Params = std::vector<int64_t>;
using MakeOperation = std::unique_ptr<Operation> (*)(const Params& params);
// By name. Params are alike in meaning on all ranks.
const std::map<std::string, MakeOperation>& Operations();

// --- one file each ---
std::unique_ptr<Operation> MakeAllReduce(const Params& params);  // reduce_op
std::unique_ptr<Operation> MakeReduce(const Params& params);     // root
std::unique_ptr<Operation> MakeScan(const Params& params);       // 1: from rank 0 up; -1: down
std::unique_ptr<Operation> MakeReduceScatter(const Params& params);
std::unique_ptr<Operation> MakeBroadcast(const Params& params);  // root
std::unique_ptr<Operation> MakeAllGather(const Params& params);
std::unique_ptr<Operation> MakeGather(const Params& params);   // root
std::unique_ptr<Operation> MakeScatter(const Params& params);  // root
std::unique_ptr<Operation> MakeAllToAll(const Params& params);
std::unique_ptr<Operation> MakeRepartition(const Params& params);  // see repartition.cpp
std::unique_ptr<Operation> MakeHalo(const Params& params);         // see halo_operation.cpp
std::unique_ptr<Operation> MakeHaloAdjoint(const Params& params);  // the same
std::unique_ptr<Operation> MakeSend(const Params& params);         // destination
std::unique_ptr<Operation> MakeRecv(const Params& params);         // source
std::unique_ptr<Operation> MakeSendRecv(const Params& params);     // destination, source; -1: none
std::unique_ptr<Operation> MakeBarrier(const Params& params);
std::unique_ptr<Operation> MakeReplicate(const Params& params);
std::unique_ptr<Operation> MakeCheckReplicated(const Params& params);

}  // namespace gradred::diff
