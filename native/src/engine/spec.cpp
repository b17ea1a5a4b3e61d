#include "engine/spec.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "base/digest.h"

namespace gradred::engine {

const char* OpName(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "allreduce";
    case Op::kAllGather:
      return "allgather";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kAllToAll:
      return "alltoall";
    case Op::kReduceScatter:
      return "reducescatter";
    case Op::kBarrier:
      return "barrier";
  }
  return "unknown";
}

std::string EntrySpec::Signature() const {
  std::ostringstream out;
  out << OpName(op);
  if (op == Op::kBarrier) return out.str();
  if (op == Op::kAllReduce || op == Op::kReduceScatter)
    out << ' ' << reduce::ReduceOpName(reduce_op);
  out << ' ' << DTypeName(dtype) << " [";
  const bool free_rows = op == Op::kAllGather || op == Op::kAllToAll;
  for (size_t i = 0; i < shape.size(); ++i) {
    out << (i ? ", " : "");
    if (i == 0 && free_rows)
      out << '*';
    else
      out << shape[i];
  }
  out << ']';
  if (wire != dtype) out << " wire " << DTypeName(wire);
  out.precision(17);
  if (prescale != 1.0) out << " prescale " << prescale;
  if (postscale != 1.0) out << " postscale " << postscale;
  if (op == Op::kBroadcast) out << " root " << root;
  return out.str();
}

int64_t EntrySpec::count() const {
  int64_t n = 1;
  for (int64_t d : shape) {
    if (d < 0) throw Error(Kind::kInternal, "the shape of '" + label + "' is not known yet");
    n *= d;
  }
  return n;
}

int64_t Arrangement::Digest() const {
  std::string text;
  for (int position : order) text += std::to_string(position) + ",";
  for (int end : group_ends) text += "|" + std::to_string(end);
  return static_cast<int64_t>(DigestOf(text, 0).lo >> 1);
}

ArrangementPtr DomainSpec::Listed() const {
  auto listed = std::make_shared<Arrangement>();
  listed->order.resize(entries.size());
  std::iota(listed->order.begin(), listed->order.end(), 0);
  listed->group_ends =
      group_ends.empty() ? std::vector<int>{static_cast<int>(entries.size())} : group_ends;
  return listed;
}

bool DomainSpec::complete() const {
  return std::all_of(entries.begin(), entries.end(), [](const EntrySpec& entry) {
    return std::all_of(entry.shape.begin(), entry.shape.end(), [](int64_t d) { return d >= 0; });
  });
}

}  // namespace gradred::engine
