#include "engine/slots.h"

#include <algorithm>
#include <utility>

namespace gradred::engine {
namespace {

// Of a process set. A slot that has not run for so long makes room for others.
constexpr int64_t kStaleRuns = 1000;
// Domains that are remembered: unnamed calls make new ones without end.
constexpr size_t kMostRecords = 2048;

bool Equal(const comm::LayoutPtr& a, const comm::LayoutPtr& b) {
  if (a == b) return true;
  if (!a || !b) return false;
  return std::equal(a->sections().begin(), a->sections().end(), b->sections().begin(),
                    b->sections().end(), [](const reduce::Section& x, const reduce::Section& y) {
                      return x.offset == y.offset && x.count == y.count && x.dtype == y.dtype &&
                             x.op == y.op;
                    });
}

}  // namespace

char* Slot::StartPack(const void* user) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at =
      std::find_if(users_.begin(), users_.end(), [user](const User& u) { return u.batch == user; });
  if (at == users_.end()) at = users_.insert(users_.end(), {user, -1});
  if (taken_ || at != users_.begin()) return nullptr;
  if (packers_ > 0 && packing_ != user) return nullptr;
  if (at->run < 0) at->run = runs_;
  if (at->run != runs_) return nullptr;
  packing_ = user;
  ++packers_;
  return data();
}

void Slot::EndPack() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--packers_ == 0) left_.notify_all();
}

void Slot::Quit(const void* user) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at =
      std::find_if(users_.begin(), users_.end(), [user](const User& u) { return u.batch == user; });
  if (at != users_.end()) users_.erase(at);
}

void Slot::Take(std::unique_lock<std::mutex>* lock) {
  taken_ = true;
  left_.wait(*lock, [this] { return packers_ == 0; });
}

bool Slot::Enter(const void* user) {
  std::unique_lock<std::mutex> lock(mutex_);
  Take(&lock);
  const int64_t run = runs_++;
  return std::any_of(users_.begin(), users_.end(),
                     [&](const User& u) { return u.batch == user && u.run == run; });
}

void Slot::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ = false;
}

void Slot::Close() {
  std::unique_lock<std::mutex> lock(mutex_);
  Take(&lock);
}

std::vector<SlotPtr> Slots::Find(const std::string& domain, const Plan& plan) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = records_.find(domain);
  if (at == records_.end()) return {};
  const Record& record = at->second;
  if (record.slots.size() != plan.groups.size()) return {};
  for (size_t g = 0; g < record.slots.size(); ++g)
    if (record.slots[g] && !Equal(record.layouts[g], plan.groups[g].layout)) return {};
  return record.slots;
}

Slots::Record& Slots::RecordOf(const std::string& domain, const Plan& plan, int group) {
  Record& record = records_[domain];
  // Not all groups: each that runs would look at each.
  if (record.layouts.size() == plan.groups.size() &&
      Equal(record.layouts[group], plan.groups[group].layout))
    return record;
  Free(&record);
  record.layouts.clear();
  for (const GroupPlan& g : plan.groups) record.layouts.push_back(g.layout);
  record.runs.assign(plan.groups.size(), 0);
  record.slots.assign(plan.groups.size(), nullptr);
  return record;
}

bool Slots::OnRun(const std::string& domain, const Plan& plan, int group,
                  comm::Communicator& communicator, SlotPtr* slot) {
  slot->reset();
  const int64_t nbytes = plan.groups[group].layout->nbytes();
  if (nbytes > limit_) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!growth_) {
    const int64_t more = Lacks(domain, plan, group, communicator);
    if (more > 0) {
      lock.unlock();  // others look up slots meanwhile: new memory takes milliseconds
      growth_ = communicator.AllocOnAll(more, &grown_);
      lock.lock();
    }
  }
  if (growth_) {
    if (!FinishGrowth(&lock)) return false;
    Place(&RecordOf(domain, plan, group), group, communicator);
  }
  *slot = RecordOf(domain, plan, group).slots[group];
  return true;
}

int64_t Slots::Lacks(const std::string& domain, const Plan& plan, int group,
                     const comm::Communicator& communicator) {
  const int64_t nbytes = plan.groups[group].layout->nbytes();
  ++runs_;
  if (records_.size() >= 2 * kMostRecords) Forget(kMostRecords);
  Record& record = RecordOf(domain, plan, group);
  record.last_run = runs_;
  if (record.slots[group] || record.runs[group]++ == 0) return 0;
  bool placed = Place(&record, group, communicator);
  if (!placed && arenas_.NextNbytes(nbytes) == 0 && runs_ >= look_at_) {
    look_at_ = runs_ + kStaleRuns / 10;
    Forget(kStaleRuns);
    placed = Place(&record, group, communicator);
  }
  return placed ? 0 : arenas_.NextNbytes(nbytes);
}

bool Slots::Place(Record* record, int group, const comm::Communicator& communicator) {
  const Arenas::Range range = arenas_.Take(record->layouts[group]->nbytes());
  if (range.segment) record->slots[group] = std::make_shared<Slot>(range, communicator.size());
  return range.segment != nullptr;
}

bool Slots::FinishGrowth(std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  const bool done = growth_->Poll();
  lock->lock();
  if (!done) return false;
  const Status status = growth_->status();
  growth_.reset();
  ThrowIfError(status);
  if (grown_)
    arenas_.Add(std::move(grown_));
  else
    arenas_.GrowNoMore();
  return true;
}

void Slots::Forget(int64_t runs) {
  for (auto at = records_.begin(); at != records_.end();) {
    if (at->second.last_run + runs >= runs_) {
      ++at;
      continue;
    }
    Free(&at->second);
    at = records_.erase(at);
  }
}

void Slots::Free(Record* record) {
  for (SlotPtr& slot : record->slots) {
    if (!slot) continue;
    slot->Close();
    arenas_.Give(slot->range());
    slot.reset();
  }
}

void Slots::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [domain, record] : records_) Free(&record);
  records_.clear();
}

int64_t Slots::nbytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return arenas_.nbytes();
}

void SlotTable::Drop(int set_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(set_id);
}

SlotsPtr SlotTable::Of(int set_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  SlotsPtr& slots = sets_[set_id];
  if (!slots) slots = std::make_shared<Slots>(limit_);
  return slots;
}

}  // namespace gradred::engine
