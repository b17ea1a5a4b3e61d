#include "engine/set_control.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/graveyard.h"
#include "base/text.h"
#include "engine/side_channel.h"

namespace gradred::engine {

namespace {

constexpr size_t kLongestLabel = 200;  // in a report, which names several

core::NegotiatorOptions OptionsFor(int id, const std::vector<int>& members, comm::World& world) {
  core::NegotiatorOptions options;
  const auto me = std::lower_bound(members.begin(), members.end(), world.topology().rank);
  options.rank = static_cast<int>(me - members.begin());
  options.size = static_cast<int>(members.size());
  options.world_ranks = members;
  options.set = "process set " + std::to_string(id);
  options.key = world.nonce();
  return options;
}

}  // namespace

SetControl::SetControl(int id, int lane, std::vector<int> members, comm::World& world,
                       DataLoop* data)
    : id_(id),
      members_(std::move(members)),
      data_(data),
      control_(world.MakeControl(members_, lane)),
      negotiator_(OptionsFor(id, members_, world)),
      rounds_(id) {}

void SetControl::Open(const BatchPtr& batch) {
  if (shutdown_asked_) return batch->FailRest(closed_);
  if (joined_) {
    after_join_.emplace_back(batch, std::nullopt);
    return;
  }
  OpenNow(batch, std::nullopt);
  Drain();
}

void SetControl::OpenHeld() {
  const auto held = std::move(after_join_);
  after_join_.clear();
  for (const auto& [batch, abandoned] : held) OpenNow(batch, abandoned);
}

void SetControl::FailHeld(const Status& status) {
  for (const auto& held : after_join_) held.first->FailRest(status);
  after_join_.clear();
}

void SetControl::OpenNow(const BatchPtr& batch, std::optional<std::string> abandoned) {
  Queue& queue = queues_[batch->spec().name];
  queue.batches.push_back({batch, std::move(abandoned)});
  if (queue.batches.size() == 1) BeginFirst(&queue);
}

void SetControl::BeginFirst(Queue* queue) {
  const auto& [batch, abandoned] = queue->batches.front();
  const int groups = static_cast<int>(batch->plan().groups.size());
  queue->begun = true;
  queue->groups_left = groups;
  queue->ready_since.assign(groups, 0);
  Enqueue(core::Begin{batch->plan().declaration});
  for (int g = 0; g < groups; ++g)
    if (batch->IsReady(g)) ReportReady(queue, g);
  if (abandoned) Enqueue(core::Abandon{batch->spec().name, *abandoned}, batch);
}

void SetControl::ReportReady(Queue* queue, int group) {
  if (queue->ready_since[group] != 0) return;
  queue->ready_since[group] = Now();
  const BatchPtr& batch = queue->batches.front().batch;
  Enqueue(core::Ready{batch->spec().name, group}, batch);
}

bool SetControl::IsStarted(const BatchPtr& batch) const {
  const auto at = queues_.find(batch->spec().name);
  return at != queues_.end() && at->second.begun && at->second.batches.front().batch == batch;
}

void SetControl::GroupReady(const BatchPtr& batch, int group) {
  // Of a batch that waits behind another, BeginFirst finds the ready groups itself.
  if (shutdown_asked_ || !IsStarted(batch)) return;
  ReportReady(&queues_.at(batch->spec().name), group);
  Drain();
}

void SetControl::Abandon(const BatchPtr& batch, const std::string& reason, Kind kind) {
  if (shutdown_asked_) return;  // the shutdown fails it
  for (auto& held : after_join_)
    if (held.first == batch) held.second = reason;
  const auto at = queues_.find(batch->spec().name);
  if (at == queues_.end()) return;  // ended already
  Queue& queue = at->second;
  const auto found = std::find_if(queue.batches.begin(), queue.batches.end(),
                                  [&](const auto& w) { return w.batch == batch && !w.abandoned; });
  if (found != queue.batches.end()) {
    found->abandoned = reason;
    if (found == queue.batches.begin() && queue.begun)
      Enqueue(core::Abandon{batch->spec().name, reason, kind}, batch);
  }
  Drain();
}

void SetControl::Join(std::function<void(int)> done) {
  joined_ = std::move(done);
  join_since_ = Now();
  Drain();
}

void SetControl::Shutdown(const std::string& reason, const Status& closed,
                          std::function<void()> done) {
  if (shutdown_asked_) return;
  shutdown_asked_ = true;
  closed_ = closed;
  all_shut_down_ = std::move(done);
  shutdown_since_ = Now();
  FailHeld(closed_);
  Enqueue(core::Shutdown{reason});
  Drain();
}

Status SetControl::Named(const std::string& domain, const Status& status) const {
  if (status.kind() == Kind::kMismatch) return status;  // has both, and reads alike in all sets
  std::string text = status.message();
  if (text.find("'" + domain + "'") == std::string::npos) text += " (in '" + domain + "')";
  if (id_ != 0 && text.find("process set") == std::string::npos)
    text += " (process set " + std::to_string(id_) + ")";
  return {status.kind(), text};
}

bool SetControl::Lacks(const Digest& domain, int group) const {
  if (group == kJoin) return !joined_ && !shutdown_asked_;
  if (group == kShutdown) return !shutdown_asked_;
  const auto named = std::find_if(queues_.begin(), queues_.end(), [&domain](const auto& queue) {
    return NameDigest(queue.first) == domain;
  });
  return negotiator_.Lacks(named == queues_.end() ? "" : named->first, group);
}

void SetControl::EndFirst(const std::string& domain) {
  const auto at = queues_.find(domain);
  Queue& queue = at->second;
  queue.batches.pop_front();
  queue.begun = false;
  if (shutdown_asked_) {  // nothing begins any more
    for (const auto& waiting : queue.batches) waiting.batch->FailRest(closed_);
    queue.batches.clear();
  }
  if (queue.batches.empty())
    queues_.erase(at);
  else
    BeginFirst(&queue);
}

void SetControl::Drain() {
  std::vector<core::Action> actions = std::move(actions_);
  const Nanos now = pending_.empty() ? 0 : Now();
  while (!pending_.empty()) {
    const Pending next = std::move(pending_.front());
    pending_.pop_front();
    if (next.batch && !IsStarted(next.batch)) continue;
    actions.clear();
    const int64_t empty = negotiator_.counters().empty_rounds;
    negotiator_.Step(next.event, now, &actions);
    if (std::holds_alternative<core::RoundDone>(next.event) ||
        std::holds_alternative<core::UnionDone>(next.event))
      rounds_.End(negotiator_.counters().empty_rounds == empty);
    for (const core::Action& action : actions) Perform(action, now);
  }
  actions.clear();
  actions_ = std::move(actions);
  if (joined_ && !join_started_ && queues_.empty() && !shutdown_asked_) {
    join_started_ = true;
    Enqueue(core::Join{});
    Drain();
  }
}

void SetControl::Perform(const core::Action& action, Nanos now) {
  if (const auto* start = std::get_if<core::StartRound>(&action)) {
    const bool as_before = words_layout_ && word_count_ == start->words.size();
    word_count_ = start->words.size();
    rounds_.Begin("round", word_count_);
    const int64_t nbytes = static_cast<int64_t>(word_count_ * sizeof(uint64_t));
    if (!words_ || words_->nbytes() < reduce::AlignUp(nbytes))
      words_ = control_->Alloc(2 * reduce::AlignUp(nbytes));
    std::memcpy(words_->data(), start->words.data(), nbytes);
    if (!as_before) {
      const reduce::Section section{0, nbytes, DType::kUint8, reduce::ReduceOp::kBitAnd};
      words_layout_ = std::make_shared<const reduce::Layout>(std::vector{section});
    }
    round_ = control_->AllReduce(*words_, 0, words_layout_);
  } else if (const auto* start = std::get_if<core::StartUnion>(&action)) {
    blob_ = start->blob;
    rounds_.Begin("union");
    union_ = control_->Union(&blob_, &core::Negotiator::Merge);
  } else if (const auto* run = std::get_if<core::Run>(&action)) {
    RunItem item;
    item.set_id = id_;
    item.group = run->group;
    item.someone_joined = run->someone_joined;
    if (run->mine) {
      Queue& queue = queues_.at(run->declaration->name);
      item.batch = queue.batches.front().batch;
      item.spec = item.batch->spec_ptr();
      waits_[waits_count_++ % waits_.size()] = now - queue.ready_since[run->group];
      queue.ready_since[run->group] = -1;
      item.batch->Start(run->group);
      data_->Post(std::move(item));
      if (--queue.groups_left == 0) EndFirst(run->declaration->name);
    } else {
      item.spec = Deserialize(run->declaration->payload);
      data_->Post(std::move(item));
    }
  } else if (const auto* fail = std::get_if<core::Fail>(&action)) {
    const auto at = queues_.find(fail->domain);
    if (at == queues_.end()) return;
    at->second.batches.front().batch->FailRest(Named(fail->domain, fail->status));
    EndFirst(fail->domain);
  } else if (const auto* joined = std::get_if<core::AllJoined>(&action)) {
    const auto done = std::move(joined_);
    joined_ = nullptr;
    join_started_ = false;
    join_since_ = 0;
    OpenHeld();
    done(members_[joined->last_rank]);
  } else if (std::get_if<core::AllShutDown>(&action)) {
    shut_down_ = true;
    if (const auto done = std::exchange(all_shut_down_, nullptr)) done();
  }
}

bool SetControl::Poll(Nanos now) {
  bool any = false;
  if (round_ && round_->Poll()) {
    ThrowIfError(round_->status());
    round_.reset();
    core::RoundDone done;
    done.words.resize(word_count_);
    std::memcpy(done.words.data(), words_->data(), word_count_ * sizeof(uint64_t));
    Enqueue(std::move(done));
    any = true;
  }
  if (union_ && union_->Poll()) {
    ThrowIfError(union_->status());
    union_.reset();
    Enqueue(core::UnionDone{blob_});
    any = true;
  }
  if (now >= NextWake()) {
    Enqueue(core::Tick{});
    any = true;
  }
  Drain();
  return any;
}

Nanos SetControl::ExpectedArrival() const {
  const size_t known = std::min<size_t>(waits_.size(), waits_count_);
  if (!round_ || known < waits_.size() / 2) return kForever;
  Nanos oldest = kForever;
  EachWaiting([&](Nanos since) { oldest = std::min(oldest, since); });
  if (oldest == kForever) return kForever;
  std::array<Nanos, std::tuple_size<decltype(waits_)>::value> waits = waits_;
  const auto median = waits.begin() + known / 2;
  std::nth_element(waits.begin(), median, waits.begin() + known);
  return oldest + *median;
}

void SetControl::FailAll(const Status& cause) {
  for (auto& [domain, queue] : queues_)
    for (const auto& waiting : queue.batches) waiting.batch->FailRest(cause);
  queues_.clear();
  FailHeld(cause);
}

void SetControl::Leak() {
  Bury(words_);
  Bury(round_);
  Bury(union_);
  Bury(control_);
}

int SetControl::OldestReady(const Queue& queue) {
  int oldest = -1;
  for (size_t g = 0; g < queue.ready_since.size(); ++g)
    if (queue.ready_since[g] > 0 &&
        (oldest < 0 || queue.ready_since[g] < queue.ready_since[oldest]))
      oldest = static_cast<int>(g);
  return oldest;
}

std::vector<SetControl::Waiting> SetControl::WaitingGroups() const {
  std::vector<Waiting> all;
  for (const auto& [domain, queue] : queues_) {
    const int oldest = OldestReady(queue);
    if (oldest < 0) continue;
    Waiting waiting{domain, oldest, queue.ready_since[oldest], ""};
    const Batch& batch = *queue.batches.front().batch;
    const GroupPlan& group = batch.plan().groups[oldest];
    for (int i = group.first; i < group.last; ++i) {
      if (i - group.first == 5) {
        waiting.tensors += " and " + std::to_string(group.last - i) + " more";
        break;
      }
      waiting.tensors += (i > group.first ? ", '" : "'") +
                         Shortened(batch.spec().entries[i].label, kLongestLabel) + "'";
    }
    all.push_back(std::move(waiting));
  }
  if (join_since_ > 0 && !shutdown_asked_) all.push_back({"", kJoin, join_since_, "join()"});
  if (shutdown_since_ > 0 && !shut_down_)
    all.push_back({"", kShutdown, shutdown_since_, "shutdown()"});
  std::sort(all.begin(), all.end(),
            [](const Waiting& a, const Waiting& b) { return a.since < b.since; });
  return all;
}

}  // namespace gradred::engine
