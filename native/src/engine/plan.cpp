#include "engine/plan.h"

#include <algorithm>
#include <atomic>
#include <sstream>
#include <utility>

#include "base/bytes.h"

namespace gradred::engine {
namespace {

using reduce::ReduceOp;

[[noreturn]] void Refuse(const DomainSpec& spec, const EntrySpec& entry, const std::string& why) {
  throw Error(Kind::kInvalidArgument, std::string(OpName(entry.op)) + " of '" + entry.label +
                                          "' (" + DTypeName(entry.dtype) + ", in '" + spec.name +
                                          "'): " + why);
}

void CheckEntry(const DomainSpec& spec, const EntrySpec& entry) {
  const bool reduces = entry.op == Op::kAllReduce || entry.op == Op::kReduceScatter;
  if (reduces && entry.reduce_op == ReduceOp::kAverage && entry.dtype == DType::kBool)
    Refuse(spec, entry, "bool has no average; use sum (or), min (and) or max (or)");
  if (reduces && entry.reduce_op == ReduceOp::kBitAnd)
    Refuse(spec, entry, "bit-and is not for tensors");
  const bool narrow =
      (entry.dtype == DType::kFloat32 || entry.dtype == DType::kFloat64) && IsFloating(entry.wire);
  if (entry.wire != entry.dtype && !(reduces && narrow))
    Refuse(spec, entry,
           std::string("cannot travel as ") + DTypeName(entry.wire) +
               "; float32 and float64 may be reduced as float16 or bfloat16");
  const bool wide = entry.dtype == DType::kInt64 || entry.dtype == DType::kUint64;
  if (reduces && entry.reduce_op == ReduceOp::kAverage && wide && entry.prescale != 1.0)
    Refuse(spec, entry,
           std::string("an average of ") + DTypeName(entry.dtype) + " takes no prescale");
  if (!reduces && (entry.prescale != 1.0 || entry.postscale != 1.0))
    Refuse(spec, entry, "prescale and postscale are for reductions");
  if ((entry.op == Op::kAllGather || entry.op == Op::kAllToAll || entry.op == Op::kReduceScatter) &&
      entry.shape.empty())
    Refuse(spec, entry, "needs at least one dimension, got a scalar");
}

}  // namespace

reduce::Section PlanMember(const EntrySpec& entry, int64_t offset, MemberPlan* member) {
  member->offset = offset;
  member->count = entry.count();
  const bool average = entry.reduce_op == ReduceOp::kAverage;
  if (average && IsInteger(entry.dtype)) {
    const bool wide = DTypeSize(entry.dtype) == 8;
    member->form = wide ? MemberPlan::Form::kInt64Average : MemberPlan::Form::kIntegerAverage;
    member->wire = DType::kInt64;
    return {offset, wide ? 2 * member->count : member->count, DType::kInt64, ReduceOp::kSum};
  }
  member->wire = entry.wire;
  const ReduceOp op = !average             ? entry.reduce_op
                      : IsHalf(entry.wire) ? ReduceOp::kAverage
                                           : ReduceOp::kSum;
  return {offset, member->count, entry.wire, op};
}

namespace {

GroupPlan PlanGroup(const DomainSpec& spec, int first, int last) {
  GroupPlan group;
  group.first = first;
  group.last = last;
  for (int i = first; i < last; ++i) group.reduces &= spec.entries[i].op == Op::kAllReduce;
  if (!group.reduces) {
    for (int i = first; i < last; ++i)
      if (spec.entries[i].op == Op::kAllReduce)
        Refuse(spec, spec.entries[i], "shares a group with a collective of another kind");
    return group;
  }
  std::vector<reduce::Section> sections;
  int64_t offset = 0;
  for (int i = first; i < last; ++i) {
    MemberPlan member;
    sections.push_back(PlanMember(spec.entries[i], offset, &member));
    offset = reduce::AlignUp(offset + sections.back().count * DTypeSize(sections.back().dtype));
    group.members.push_back(member);
  }
  group.trailer_offset = offset;
  sections.push_back({offset, last - first + 2, DType::kInt64, ReduceOp::kSum});
  group.layout = std::make_shared<const reduce::Layout>(std::move(sections));
  return group;
}

std::shared_ptr<const Plan> MakePlan(const DomainSpec& spec) {
  if (spec.name.empty()) throw Error(Kind::kInvalidArgument, "a domain needs a name");
  if (spec.entries.empty())
    throw Error(Kind::kInvalidArgument, "the domain '" + spec.name + "' has no entries");
  auto plan = std::make_shared<Plan>();
  auto declaration = std::make_shared<core::Declaration>();
  declaration->name = spec.name;
  const int n = static_cast<int>(spec.entries.size());
  declaration->group_ends = spec.group_ends.empty() ? std::vector<int>{n} : spec.group_ends;
  for (const EntrySpec& entry : spec.entries) {
    CheckEntry(spec, entry);
    declaration->entries.push_back({entry.Signature(), entry.label});
    plan->nbytes += entry.count() * DTypeSize(entry.dtype);
  }
  int first = 0;
  for (int end : declaration->group_ends) {
    if (end <= first || end > n)
      throw Error(Kind::kInvalidArgument,
                  "the groups of '" + spec.name + "' end at " + std::to_string(end) + " after " +
                      std::to_string(first) + "; expected ascending ends up to " +
                      std::to_string(n));
    plan->group_of.resize(end, static_cast<int>(plan->groups.size()));
    plan->groups.push_back(PlanGroup(spec, first, end));
    first = end;
  }
  if (first != n)
    throw Error(Kind::kInvalidArgument, "the groups of '" + spec.name + "' cover " +
                                            std::to_string(first) + " of " + std::to_string(n) +
                                            " entries");
  declaration->payload = Serialize(spec);
  plan->declaration = std::move(declaration);
  return plan;
}

}  // namespace

std::shared_ptr<const Plan> PlanOf(const DomainSpec& spec) {
  std::shared_ptr<const Plan> plan = std::atomic_load(&spec.plan);
  if (plan) return plan;
  plan = MakePlan(spec);
  std::atomic_store(&spec.plan, plan);  // two threads may both have made one: they are equal
  return plan;
}

std::string Serialize(const DomainSpec& spec) {
  Writer out;
  out.PutString(spec.name);
  out.Put<int32_t>(spec.process_set);
  out.Put<uint32_t>(spec.entries.size());
  for (const EntrySpec& entry : spec.entries) {
    out.PutString(entry.label);
    out.Put(entry.op);
    out.Put(entry.reduce_op);
    out.Put(entry.dtype);
    out.Put(entry.wire);
    out.Put<uint32_t>(entry.shape.size());
    for (int64_t d : entry.shape) out.Put(d);
    out.Put(entry.prescale);
    out.Put(entry.postscale);
    out.Put<int32_t>(entry.root);
  }
  out.Put<uint32_t>(spec.group_ends.size());
  for (int end : spec.group_ends) out.Put<int32_t>(end);
  return out.Take();
}

DomainSpecPtr Deserialize(const std::string& bytes) {
  Reader in(bytes);
  auto spec = std::make_shared<DomainSpec>();
  spec->name = in.GetString();
  spec->process_set = in.Get<int32_t>();
  spec->entries.resize(in.Get<uint32_t>());
  for (EntrySpec& entry : spec->entries) {
    entry.label = in.GetString();
    entry.op = in.Get<Op>();
    entry.reduce_op = in.Get<ReduceOp>();
    entry.dtype = in.Get<DType>();
    entry.wire = in.Get<DType>();
    entry.shape.resize(in.Get<uint32_t>());
    for (int64_t& d : entry.shape) d = in.Get<int64_t>();
    entry.prescale = in.Get<double>();
    entry.postscale = in.Get<double>();
    entry.root = in.Get<int32_t>();
  }
  spec->group_ends.resize(in.Get<uint32_t>());
  for (int& end : spec->group_ends) end = in.Get<int32_t>();
  return spec;
}

namespace {

// One element on the wire: its dtype, and the bytes of what stands for one of the tensor.
std::pair<DType, int64_t> OnTheWire(const EntrySpec& entry) {
  if (entry.op != Op::kAllReduce) return {entry.dtype, DTypeSize(entry.dtype)};
  EntrySpec scalar = entry;
  scalar.shape = {};
  MemberPlan member;
  const reduce::Section section = PlanMember(scalar, 0, &member);
  return {section.dtype, section.count * DTypeSize(section.dtype)};
}

// A sum of bytes, "?" when a tensor's shape is not known yet.
class NbytesText {
 public:
  void Add(const EntrySpec& entry, int64_t element_nbytes) {
    known_ &= std::all_of(entry.shape.begin(), entry.shape.end(), [](int64_t d) { return d >= 0; });
    if (known_) nbytes_ += entry.count() * element_nbytes;
  }
  std::string Get() const { return known_ ? std::to_string(nbytes_) : "?"; }

 private:
  bool known_ = true;
  int64_t nbytes_ = 0;
};

}  // namespace

// Not from PlanOf: dimensions may be unknown, and what is wrong with a spec is for Open to say.
std::string Describe(const DomainSpec& spec) {
  const int n = static_cast<int>(spec.entries.size());
  const std::vector<int> ends = spec.group_ends.empty() ? std::vector<int>{n} : spec.group_ends;
  NbytesText total;
  for (const EntrySpec& entry : spec.entries) total.Add(entry, DTypeSize(entry.dtype));
  std::ostringstream out;
  out << spec.name << ": " << n << " entries, " << total.Get() << " bytes, " << ends.size()
      << (ends.size() == 1 ? " group" : " groups") << '\n';
  int first = 0;
  for (size_t g = 0; g < ends.size(); ++g) {
    const int end = std::min(ends[g], n);
    NbytesText nbytes;
    std::string members;
    for (int i = first; i < end; ++i) {
      const auto [dtype, element_nbytes] = OnTheWire(spec.entries[i]);
      nbytes.Add(spec.entries[i], element_nbytes);
      members += ' ' + spec.entries[i].label + " (" + DTypeName(dtype) + ')';
    }
    out << "  group " << g << ": " << end - first << " entries, " << nbytes.Get()
        << " bytes on the wire:" << members << '\n';
    first = end;
  }
  return out.str();
}

}  // namespace gradred::engine
