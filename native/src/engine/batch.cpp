#include "engine/batch.h"

#include <utility>

#include "engine/completions.h"
#include "engine/pack.h"

namespace gradred::engine {

class Batch::Lock {
 public:
  explicit Lock(const Batch* batch) : completions_(batch->completions_), lock_(batch->mutex_) {}
  ~Lock() {
    lock_.unlock();
    for (auto& callback : callbacks_) completions_->Post(std::move(callback));
  }
  std::vector<std::function<void()>> callbacks_;

 private:
  const std::shared_ptr<Completions> completions_;
  std::unique_lock<std::mutex> lock_;
};

Batch::Batch(DomainSpecPtr spec, std::shared_ptr<const Plan> plan, std::vector<SlotPtr> slots,
             std::shared_ptr<Completions> completions, std::shared_ptr<MetricsStore> metrics)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      completions_(std::move(completions)),
      metrics_(std::move(metrics)),
      slots_(std::move(slots)),
      members_(spec_->entries.size()),
      submitted_(members_.size(), false),
      completed_(members_.size(), false),
      packing_(members_.size(), false),
      packed_(members_.size(), false),
      counts_(plan_->groups.size()),
      state_(plan_->groups.size(), State::kFilling),
      not_submitted_(static_cast<int>(members_.size())),
      not_completed_(not_submitted_),
      trace_(*spec_, plan_) {
  for (const GroupPlan& group : plan_->groups) missing_.push_back(group.last - group.first);
}

Batch::~Batch() {
  Lock lock(this);
  for (const SlotPtr& slot : slots_)
    if (slot) slot->Quit(this);
  for (size_t i = 0; i < members_.size(); ++i)
    if (submitted_[i] && !completed_[i])
      Complete(static_cast<int>(i),
               {{Kind::kInternal, "the engine dropped '" + spec_->name + "'"}, {}, 0, {}}, &lock);
}

int Batch::Submit(int position, Submission submission) {
  char* at = nullptr;  // of the group's slot
  {
    Lock lock(this);
    if (position < 0 || position >= static_cast<int>(members_.size()))
      throw Error(Kind::kInvalidArgument, "position " + std::to_string(position) + " of '" +
                                              spec_->name + "', which has " +
                                              std::to_string(members_.size()) + " entries");
    if (submitted_[position])
      throw Error(Kind::kInvalidArgument, "'" + spec_->entries[position].label + "' (position " +
                                              std::to_string(position) + " of '" + spec_->name +
                                              "') was submitted twice in one batch");
    submitted_[position] = true;
    members_[position] = std::move(submission);
    if (--not_submitted_ == 0) last_submit_ = Now();
    const int group = plan_->group_of[position];
    if (state_[group] != State::kFailed) trace_.Submitted(position, group, not_submitted_ == 0);
    if (state_[group] != State::kFailed && SlotOf(group)) at = SlotOf(group)->StartPack(this);
    if (!at) return Arrive(position, &lock);
    packing_[position] = true;  // who fails the group meanwhile leaves this member to us
  }
  const int group = plan_->group_of[position];
  const Submission& member = members_[position];
  reduce::ConvertCounts counts;
  {
    const timeline::Span span("pack", timeline::kNone, tag(), group, position);
    PackMember(spec_->entries[position],
               plan_->groups[group].members[position - plan_->groups[group].first],
               member.absent ? nullptr : member.input, SlotOf(group)->set_size(), at, &counts);
  }
  SlotOf(group)->EndPack();
  Lock lock(this);
  packing_[position] = false;
  packed_[position] = true;
  counts_[group].non_finite += counts.non_finite;
  counts_[group].saturated += counts.saturated;
  return Arrive(position, &lock);
}

int Batch::Arrive(int position, Lock* lock) {
  const int group = plan_->group_of[position];
  if (state_[group] == State::kFailed) {
    Complete(position, {failure_, {}, 0, {}}, lock);
    return -1;
  }
  if (--missing_[group] > 0) return -1;
  state_[group] = State::kReady;
  trace_.Ready(group);
  return group;
}

bool Batch::IsReady(int group) const {
  Lock lock(this);
  return state_[group] == State::kReady;
}

void Batch::Start(int group) {
  Lock lock(this);
  if (state_[group] != State::kReady)
    throw Error(Kind::kInternal,
                "group " + std::to_string(group) + " of '" + spec_->name + "' runs unready");
  state_[group] = State::kRunning;
  trace_.Agreed(group);
}

std::vector<Submission*> Batch::Take(int group) {
  Lock lock(this);
  trace_.Started(group);
  std::vector<Submission*> members;
  for (int i = plan_->groups[group].first; i < plan_->groups[group].last; ++i)
    members.push_back(&members_[i]);
  return members;
}

Batch::Packed Batch::TakePacked(int group) {
  Lock lock(this);
  const GroupPlan& plan = plan_->groups[group];
  return {{packed_.begin() + plan.first, packed_.begin() + plan.last}, counts_[group]};
}

void Batch::Complete(int position, Result result, Lock* lock) {
  completed_[position] = true;
  Submission submission = std::move(members_[position]);
  members_[position] = {};
  const bool last = --not_completed_ == 0;
  if (last && result.status.ok() && not_submitted_ == 0) {
    const double wait = Seconds(Now() - last_submit_);
    metrics_->Update([wait](Metrics& m) {
      ++m.batches;
      m.wait_s += wait;
      m.last_wait_s = wait;
    });
  }
  if (!submission.done) return;
  lock->callbacks_.push_back([done = std::move(submission.done), result = std::move(result),
                              tag = trace_.tag(), group = plan_->group_of[position], position] {
    timeline::Span span("done", timeline::kNone, tag, group, position);
    done(result);
  });
}

void Batch::Finish(int group, std::vector<Result> results) {
  Lock lock(this);
  state_[group] = State::kFinished;
  if (SlotOf(group)) SlotOf(group)->Quit(this);
  trace_.Ended(group);
  for (size_t i = 0; i < results.size(); ++i)
    Complete(plan_->groups[group].first + static_cast<int>(i), std::move(results[i]), &lock);
}

void Batch::FailGroup(int group, const Status& status) {
  std::vector<Result> results(plan_->groups[group].last - plan_->groups[group].first);
  for (Result& result : results) result.status = status;
  Finish(group, std::move(results));
}

void Batch::FailRest(const Status& status) {
  Lock lock(this);
  if (failure_.ok()) failure_ = status;
  bool any = false;
  for (size_t g = 0; g < state_.size(); ++g) {
    if (state_[g] != State::kFilling && state_[g] != State::kReady) continue;
    state_[g] = State::kFailed;
    trace_.Ended(static_cast<int>(g));
    any = true;
    if (SlotOf(static_cast<int>(g))) SlotOf(static_cast<int>(g))->Quit(this);
    for (int i = plan_->groups[g].first; i < plan_->groups[g].last; ++i)
      if (submitted_[i] && !completed_[i] && !packing_[i])
        Complete(static_cast<int>(i), {failure_, {}, 0, {}}, &lock);
  }
  if (any) metrics_->Update([](Metrics& m) { ++m.abandoned; });
}

}  // namespace gradred::engine
