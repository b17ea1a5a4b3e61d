// What a caller asks of the engine: entries, domains, submissions, results.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "reduce/layout.h"

namespace gradred::engine {

enum class Op : uint8_t { kAllReduce, kAllGather, kBroadcast, kAllToAll, kReduceScatter, kBarrier };
const char* OpName(Op op);

using Shape = std::vector<int64_t>;  // -1: not known yet (only in registered specs)

struct EntrySpec {
  std::string label;  // for messages: a variable's name
  Op op = Op::kAllReduce;
  reduce::ReduceOp reduce_op = reduce::ReduceOp::kSum;  // kAverage for every dtype but bool
  DType dtype = DType::kFloat32;
  DType wire =
      DType::kFloat32;  // of float32 and float64 tensors: float16 or bfloat16; else equal to dtype
  Shape shape;          // allgather, alltoall: the first dimension is no part of the signature
  double prescale = 1.0, postscale = 1.0;
  int root = 0;  // broadcast: rank in the world

  // What must agree over ranks: "allreduce average float32 [3, 4] wire float16".
  std::string Signature() const;
  int64_t count() const;  // elements; kInternal when a dimension is -1
};

struct Plan;  // engine/plan.h

// An order of a domain's entries, cut into groups.
struct Arrangement {
  std::vector<int> order;       // order[place] = position in the list of the domain
  std::vector<int> group_ends;  // of places; the last is the number of entries
  int64_t Digest() const;       // not negative
};
using ArrangementPtr = std::shared_ptr<const Arrangement>;

struct DomainSpec {
  std::string name;
  int process_set = 0;
  std::vector<EntrySpec> entries;
  std::vector<int> group_ends;  // empty: one group

  // The list is alike on all ranks. What follows is this rank's wish: See Note [Plans of a domain]
  ArrangementPtr proposal;  // null: as listed
  bool planned = false;     // order and groups are to be measured, and changed while it runs
  bool varies = false;      // dimensions differ from batch to batch

  bool complete() const;  // every dimension is known
  ArrangementPtr Listed() const;

  // What the engine makes of the spec, once. A spec does not change after its first Open.
  mutable std::shared_ptr<const Plan> plan;
};
using DomainSpecPtr = std::shared_ptr<const DomainSpec>;

struct Result {
  Status status;
  Shape shape;                           // of the output
  int present = 0;                       // ranks that brought a tensor and not ABSENT (allreduce)
  std::vector<int64_t> received_splits;  // alltoall
};

// One member of a batch. `input` stays valid until `done` runs; `output` may be `input`. Where the
// output's shape is known only at the end (allgather, alltoall, reducescatter), `allocate` is
// called once, by whoever steps the engine, and returns its memory (null: out of memory). `done` is
// called exactly once, without locks and outside the loops, by an engine thread or by one that is
// in Submit or StepUntil; it must not wait for the engine.
struct Submission {
  bool absent = false;  // no tensor in this batch: counts as zeros, see Result::present. `output`,
                        // where not null, is filled.
  const void* input = nullptr;
  void* output = nullptr;
  std::function<void*(const Shape&)> allocate;
  // alltoall: rows for each rank of the set; none: equal parts
  std::optional<std::vector<int64_t>> splits;
  std::function<void(const Result&)> done;
};

}  // namespace gradred::engine
