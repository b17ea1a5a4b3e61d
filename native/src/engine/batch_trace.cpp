#include "engine/batch_trace.h"

namespace gradred::engine {
namespace {

int64_t NbytesOf(const DomainSpec& spec, const GroupPlan& group) {
  int64_t nbytes = 0;
  for (int i = group.first; i < group.last; ++i)
    if (spec.entries[i].op != Op::kBarrier)
      nbytes += spec.entries[i].count() * DTypeSize(spec.entries[i].dtype);
  return nbytes;
}

}  // namespace

void BatchTrace::Open(const DomainSpec& spec, const std::shared_ptr<const Plan>& plan) {
  tag_ = timeline::BeginBatch(spec.name, plan, [&] {
    timeline::DomainInfo info;
    info.name = spec.name;
    info.set = spec.process_set;
    for (const EntrySpec& entry : spec.entries) info.labels.push_back(entry.label);
    for (const GroupPlan& group : plan->groups)
      info.groups.push_back({group.first, group.last, NbytesOf(spec, group)});
    return info;
  });
  if (!tag_.domain) return;
  phases_.assign(plan->groups.size(), Phase::kNone);
  for (const GroupPlan& group : plan->groups) {
    nbytes_.push_back(NbytesOf(spec, group));
    sizes_.push_back(group.last - group.first);
  }
  Push(timeline::Shape::kOpen, "step", Now(), timeline::kNone);
}

void BatchTrace::Push(timeline::Shape shape, const char* name, Nanos at, int group, bool spent) {
  timeline::Record record;
  record.begin = at;
  record.name = name;
  record.domain = tag_.domain;
  record.batch = tag_.batch;
  record.group = group;
  if (group != timeline::kNone && shape == timeline::Shape::kOpen) record.nbytes = nbytes_[group];
  if (spent) record.SetSpent(timeline::TakeSpent());
  record.shape = shape;
  timeline::Push(record);
}

void BatchTrace::DoSubmitted(int position, int group, bool last_of_batch) {
  timeline::Record record;
  const Nanos at = record.begin = Now();
  record.name = "submit";
  record.domain = tag_.domain;
  record.batch = tag_.batch;
  record.group = group;
  record.entry = position;
  timeline::Push(record);
  if (phases_[group] == Phase::kNone && sizes_[group] > 1) EnterAt(at, group, Phase::kMembers);
  if (!last_of_batch) return;
  waits_ = true;
  Push(timeline::Shape::kOpen, "wait", at, timeline::kNone);
}

void BatchTrace::EnterAt(Nanos at, int group, Phase phase) {
  static constexpr const char* kNames[] = {"", "waiting for members", "negotiation", "queued",
                                           "reduce"};
  Phase& now = phases_[group];
  if (now == phase) return;
  if (now != Phase::kNone)
    Push(timeline::Shape::kClose, kNames[static_cast<int>(now)], at, group, now == Phase::kReduce);
  if (phase == Phase::kReduce) timeline::TakeSpent();  // on others before
  if (phase != Phase::kNone)
    Push(timeline::Shape::kOpen, kNames[static_cast<int>(phase)], at, group);
  now = phase;
}

void BatchTrace::DoEnded(int group) {
  const Nanos at = Now();
  EnterAt(at, group, Phase::kNone);
  if (++ended_ < phases_.size()) return;
  if (waits_) Push(timeline::Shape::kClose, "wait", at, timeline::kNone);
  Push(timeline::Shape::kClose, "step", at, timeline::kNone);
}

}  // namespace gradred::engine
