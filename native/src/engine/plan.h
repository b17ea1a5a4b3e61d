// What the engine makes of a spec: the declaration that ranks agree on, and the layout of each
// group's part of the fusion buffer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/negotiator.h"
#include "engine/spec.h"

namespace gradred::engine {

// How one tensor that is reduced lies in the fusion buffer.
struct MemberPlan {
  enum class Form : uint8_t {
    kPlain,           // wire elements, scaled by prescale
    kIntegerAverage,  // int64 sums, divided when unpacked
    kInt64Average,  // of int64 and uint64: quotient and remainder of each element, 2 * count int64
  };
  Form form = Form::kPlain;
  DType wire = DType::kFloat32;
  int64_t offset = 0;  // bytes
  int64_t count = 0;   // elements of the tensor

  int64_t element_nbytes() const {  // of what stands for one of the tensor; divides kAlign
    return DTypeSize(wire) * (form == Form::kInt64Average ? 2 : 1);
  }
  int64_t end() const { return offset + count * element_nbytes(); }
};

// Behind the tensors of a group rides one int64 for each member (1 from each rank that brought a
// tensor) and two more: the non-finite and the saturated elements that the ranks met when packing.
// So every rank knows both without a message more.
struct GroupPlan {
  int first = 0, last = 0;          // entries [first, last)
  bool reduces = true;              // all allreduce; else the entries run one after the other
  std::vector<MemberPlan> members;  // [last - first], of a group that reduces
  comm::LayoutPtr layout;
  int64_t trailer_offset = 0;
};

struct Plan {
  core::DeclarationPtr declaration;
  std::vector<GroupPlan> groups;
  std::vector<int> group_of;  // [entries]
  int64_t nbytes = 0;         // of the tensors
};

// The plan of `spec`, made on first use; any thread. Throws kInvalidArgument naming domain and
// entry for what cannot be.
std::shared_ptr<const Plan> PlanOf(const DomainSpec& spec);

// Where a tensor that is reduced lies when its bytes begin at `offset`, and what is reduced there.
reduce::Section PlanMember(const EntrySpec& entry, int64_t offset, MemberPlan* member);

// Spec to bytes and back: what a joined rank needs to supply zeros.
std::string Serialize(const DomainSpec& spec);
DomainSpecPtr Deserialize(const std::string& bytes);

// One line a group: its entries, bytes and dtypes.
std::string Describe(const DomainSpec& spec);

}  // namespace gradred::engine
