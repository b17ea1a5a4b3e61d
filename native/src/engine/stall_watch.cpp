#include "engine/stall_watch.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "base/timeline.h"

namespace gradred::engine {
namespace {

// The question goes out this long before the limit, so that the answers are there when it passes.
constexpr Nanos kAhead = 700 * kMillisecond;
constexpr size_t kLongestName = 200;  // in a report

void Report(const std::string& text) {
  timeline::Note("stall", text);
  Log(LogLevel::kWarning, "stall: " + text);
}

std::string ForSeconds(Nanos t) {
  const int64_t tenths = t / (100 * kMillisecond);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string Place(const SetControl& set) {
  return "process set " + std::to_string(set.id()) +
         (set.id() == 0 ? "" : " of " + RanksText(set.members()));
}

}  // namespace

std::string StallWatch::Describe(const SetControl& set, const SetControl::Waiting& waiting,
                                 const Stall& stall, Nanos now) const {
  const bool ends = waiting.group < 0;
  std::string text = "rank " + std::to_string(rank_) + " has waited " +
                     ForSeconds(now - waiting.since) + (ends ? " in " : " for ") + waiting.tensors;
  if (ends)
    text += ": ";
  else
    text += " (group " + std::to_string(waiting.group) + " of '" +
            Shortened(waiting.domain, kLongestName) + "', " + Place(set) + "): ";
  if (stall.lacking.empty())
    return text + (ends ? "no rank answered that it has not called it"
                        : "no rank answered that it lacks them");
  text += ends ? "not called by rank" : "not submitted by rank";
  text += stall.lacking.size() == 1 ? " " : "s ";
  bool first = true;
  for (const auto& [rank, oldest] : stall.lacking) {
    text += (first ? "" : ", ") + std::to_string(rank);
    if (!oldest.empty()) text += " (which waits for " + oldest + ")";
    first = false;
  }
  return text;
}

std::optional<Status> StallWatch::Check(const std::vector<std::unique_ptr<SetControl>>& sets,
                                        Nanos now) {
  if (warn_ == 0 && fail_ == 0) return std::nullopt;
  std::map<Key, Stall> still;
  std::optional<Status> failure;
  for (const auto& set : sets) {
    for (const SetControl::Waiting& waiting : set->WaitingGroups()) {
      const bool ends = waiting.group < 0;
      if (ends && set->id() != 0)
        continue;  // a join is of set 0, and one word of a shutdown enough
      const Key key{set->id(), NameDigest(waiting.domain)};
      Stall& stall = still[key];
      const auto old = stalls_.find(key);
      if (old != stalls_.end() && old->second.group == waiting.group &&
          old->second.since == waiting.since)
        stall = std::move(old->second);
      stall.group = waiting.group;
      stall.since = waiting.since;
      const Nanos age = now - waiting.since;
      const auto ask = [&](bool* asked) {
        if (*asked) return;
        *asked = true;
        if (stall.asked_by_peer && asked == &stall.asked_warn) return;
        stall.lacking.clear();
        side_->Ask({rank_, set->id(), waiting.group, key.second});
      };
      if (warn_ > 0 && age >= warn_ - kAhead) ask(&stall.asked_warn);
      if (fail_ > 0 && !ends && age >= fail_ - kAhead) ask(&stall.asked_fail);
      if (warn_ > 0 && age >= warn_ && !stall.warned) {
        stall.warned = true;
        if (!stall.asked_by_peer) Report(Describe(*set, waiting, stall, now));
        stall.asked_by_peer = false;
      }
      if (fail_ > 0 && !ends && age >= fail_ && !failure)
        failure = Status(Kind::kTimeout, Describe(*set, waiting, stall, now) +
                                             "; the stall limit is " + ForSeconds(fail_));
    }
  }
  stalls_ = std::move(still);
  return failure;
}

Nanos StallWatch::NextWake(const std::vector<std::unique_ptr<SetControl>>& sets, Nanos now) const {
  Nanos next = kForever;
  if (warn_ == 0 && fail_ == 0) return next;
  for (const auto& set : sets)
    set->EachWaiting([&](Nanos since) {
      for (Nanos limit : {warn_ - kAhead, warn_, fail_ - kAhead, fail_})
        if (limit > 0 && since + limit > now) next = std::min(next, since + limit);
    });
  return next;
}

bool StallWatch::awaits_answers() const {
  return std::any_of(stalls_.begin(), stalls_.end(), [](const auto& entry) {
    const Stall& stall = entry.second;
    return (stall.asked_warn || stall.asked_fail) && stall.lacking.empty() && !stall.warned;
  });
}

void StallWatch::OnQuestion(const WhoLacks& question,
                            const std::vector<std::unique_ptr<SetControl>>& sets, Nanos now) {
  for (const auto& set : sets) {
    if (set->id() != question.set_id) continue;
    if (!set->Lacks(question.domain, question.group)) {
      // Somebody else asks for what we wait for: one report is enough.
      const auto stall = stalls_.find({question.set_id, question.domain});
      if (stall != stalls_.end() && !stall->second.asked_warn && !stall->second.asked_fail)
        stall->second.asked_by_peer = true;
      return;
    }
    std::string oldest;
    for (const auto& other : sets)
      for (const SetControl::Waiting& waiting : other->WaitingGroups()) {
        // With the domain, for which both may wait under one label.
        const bool named = waiting.group < 0 || waiting.tensors == "'" + waiting.domain + "'";
        const std::string of = named ? "" : " of '" + Shortened(waiting.domain, kLongestName) + "'";
        // Or in another set, where it waits for those that ask.
        const std::string in = other == set ? "" : " in " + Place(*other);
        if (oldest.empty())
          oldest = waiting.tensors + of + in + " for " + ForSeconds(now - waiting.since);
        break;
      }
    side_->Answer(question.asker,
                  {rank_, question.set_id, question.group, question.domain, oldest});
  }
}

void StallWatch::OnAnswer(const ILack& answer) {
  const auto stall = stalls_.find({answer.set_id, answer.domain});
  if (stall != stalls_.end() && stall->second.group == answer.group)
    stall->second.lacking[answer.rank] = answer.oldest;
}

}  // namespace gradred::engine
