#include "engine/batch.h"

#include <utility>

#include "engine/completions.h"
#include "engine/pack.h"

namespace gradred::engine {
namespace {

// Callbacks of arrays take less, and there is one a tensor: their events would cost as much again
// as all others.
constexpr Nanos kSeenCallback = 1000;

}  // namespace

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
      groups_(plan_->groups.size()),
      not_submitted_(static_cast<int>(members_.size())),
      not_completed_(not_submitted_),
      trace_(*spec_, plan_) {
  for (size_t g = 0; g < groups_.size(); ++g)
    groups_[g].missing = plan_->groups[g].last - plan_->groups[g].first;
}

Batch::~Batch() {
  Lock lock(this);
  for (const SlotPtr& slot : slots_)
    if (slot) slot->Quit(this);
  for (size_t i = 0; i < members_.size(); ++i)
    if (members_[i].submitted && !members_[i].completed)
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
    Member& member = members_[position];
    if (member.submitted)
      throw Error(Kind::kInvalidArgument, "'" + spec_->entries[position].label + "' (position " +
                                              std::to_string(position) + " of '" + spec_->name +
                                              "') was submitted twice in one batch");
    member.submitted = true;
    member.submission = std::move(submission);
    if (--not_submitted_ == 0) last_submit_ = Now();
    const int group = plan_->group_of[position];
    if (groups_[group].state != State::kFailed) {
      trace_.Submitted(position, group, not_submitted_ == 0);
      if (SlotOf(group)) at = SlotOf(group)->StartPack(this);
    }
    if (!at) return Arrive(position, &lock);
    member.packing = true;  // who fails the group meanwhile leaves this member to us
  }
  const int group = plan_->group_of[position];
  const Submission& member = members_[position].submission;
  reduce::ConvertCounts counts;
  {
    const timeline::Span span("pack", timeline::kNone, tag(), group, position);
    PackMember(spec_->entries[position],
               plan_->groups[group].members[position - plan_->groups[group].first],
               member.absent ? nullptr : member.input, SlotOf(group)->set_size(), at, &counts);
  }
  SlotOf(group)->EndPack();
  Lock lock(this);
  members_[position].packing = false;
  members_[position].packed = true;
  groups_[group].counts.non_finite += counts.non_finite;
  groups_[group].counts.saturated += counts.saturated;
  return Arrive(position, &lock);
}

int Batch::Arrive(int position, Lock* lock) {
  const int group = plan_->group_of[position];
  if (groups_[group].state == State::kFailed) {
    Complete(position, {failure_, {}, 0, {}}, lock);
    return -1;
  }
  if (--groups_[group].missing > 0) return -1;
  groups_[group].state = State::kReady;
  trace_.Ready(group);
  return group;
}

bool Batch::IsReady(int group) const {
  Lock lock(this);
  return groups_[group].state == State::kReady;
}

void Batch::Start(int group) {
  Lock lock(this);
  if (groups_[group].state != State::kReady)
    throw Error(Kind::kInternal,
                "group " + std::to_string(group) + " of '" + spec_->name + "' runs unready");
  groups_[group].state = State::kRunning;
  trace_.Agreed(group);
}

std::vector<Submission*> Batch::Take(int group) {
  Lock lock(this);
  trace_.Started(group);
  std::vector<Submission*> members;
  for (int i = plan_->groups[group].first; i < plan_->groups[group].last; ++i)
    members.push_back(&members_[i].submission);
  return members;
}

Batch::Packed Batch::TakePacked(int group) {
  Lock lock(this);
  Packed packed{{}, groups_[group].counts};
  for (int i = plan_->groups[group].first; i < plan_->groups[group].last; ++i)
    packed.members.push_back(members_[i].packed);
  return packed;
}

void Batch::Complete(int position, Result result, Lock* lock) {
  members_[position].completed = true;
  Submission submission = std::exchange(members_[position].submission, {});
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
    timeline::Span span("done", timeline::kNone, tag, group, position, kSeenCallback);
    done(result);
  });
}

void Batch::Finish(int group, std::vector<Result> results) {
  Lock lock(this);
  groups_[group].state = State::kFinished;
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
  for (size_t g = 0; g < groups_.size(); ++g) {
    State& state = groups_[g].state;
    if (state != State::kFilling && state != State::kReady) continue;
    state = State::kFailed;
    trace_.Ended(static_cast<int>(g));
    any = true;
    if (SlotOf(static_cast<int>(g))) SlotOf(static_cast<int>(g))->Quit(this);
    for (int i = plan_->groups[g].first; i < plan_->groups[g].last; ++i)
      if (members_[i].submitted && !members_[i].completed && !members_[i].packing)
        Complete(i, {failure_, {}, 0, {}}, &lock);
  }
  if (any) metrics_->Update([](Metrics& m) { ++m.abandoned; });
}

}  // namespace gradred::engine
