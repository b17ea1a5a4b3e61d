// A batch as its caller sees it: positions are those of the caller's list, and it may be held until
// the ranks know under which plan it runs.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/batch.h"
#include "engine/batch_times.h"
#include "engine/form.h"

namespace gradred::engine {

class OpenBatch {
 public:
  explicit OpenBatch(DomainSpecPtr listed) : listed_(std::move(listed)) {}
  ~OpenBatch() {
    for (auto& [position, submission] : kept_.submissions)
      if (submission.done)
        submission.done(
            {{Kind::kInternal, "the engine dropped '" + listed_->name + "'"}, {}, 0, {}});
  }

  const DomainSpecPtr& listed() const { return listed_; }

  // While it is held: keeps what comes and returns true. Throws kInvalidArgument for a position
  // that was kept before.
  bool Keep(int position, Submission* submission) {
    if (open_.load(std::memory_order_acquire)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_.load(std::memory_order_relaxed)) return false;
    for (const auto& kept : kept_.submissions)
      if (kept.first == position)
        throw Error(Kind::kInvalidArgument, "'" + listed_->entries[position].label +
                                                "' (position " + std::to_string(position) +
                                                " of '" + listed_->name +
                                                "') was submitted twice in one batch");
    kept_.submissions.emplace_back(position, std::move(*submission));
    return true;
  }
  bool KeepAbandon(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_.load(std::memory_order_relaxed)) return false;
    if (!kept_.abandoned) kept_.abandoned = reason;
    return true;
  }

  struct Kept {
    std::vector<std::pair<int, Submission>> submissions;
    std::optional<std::string> abandoned;
  };
  // Once. From here on submissions go to `batch`; what was kept is the caller's to submit. `form`
  // null: as listed. `times` null: not recorded.
  Kept SetOpen(BatchPtr batch, FormPtr form, std::shared_ptr<BatchTimes> times) {
    std::lock_guard<std::mutex> lock(mutex_);
    batch_ = std::move(batch);
    form_ = std::move(form);
    times_ = std::move(times);
    open_.store(true, std::memory_order_release);
    return std::exchange(kept_, {});
  }
  // When it is open.
  const BatchPtr& batch() const { return batch_; }
  int PlaceOf(int position) const { return form_ ? form_->place_of[position] : position; }
  void NoteSubmitted(int position) {
    if (times_) times_->Submitted(position);
  }

 private:
  const DomainSpecPtr listed_;
  std::atomic<bool> open_{false};
  std::mutex mutex_;
  Kept kept_;
  BatchPtr batch_;
  FormPtr form_;
  std::shared_ptr<BatchTimes> times_;
};

}  // namespace gradred::engine
