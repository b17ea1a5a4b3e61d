#include "engine/elsewhere_watch.h"

#include <algorithm>
#include <iterator>

#include "core/rank_set.h"

namespace gradred::engine {
namespace {

constexpr Nanos kPatience = 5000 * kMillisecond;
constexpr Nanos kForgetAfter = 60000 * kMillisecond;

constexpr size_t kLongestText = 1000;

SetControl* Find(const ElsewhereWatch::Sets& sets, int id) {
  for (const auto& set : sets)
    if (set->id() == id) return set.get();
  return nullptr;
}

bool HasMember(const SetControl& set, int rank) {
  return std::binary_search(set.members().begin(), set.members().end(), rank);
}

// TensorFlow's part ends the names of sets other than 0 like this: gradred/tensorflow/graph.py.
std::string SetSuffix(int id) { return "@" + std::to_string(id); }

std::string WithoutSet(const std::string& domain, int id) {
  const std::string suffix = SetSuffix(id);
  const size_t at = domain.rfind(suffix);
  return at != std::string::npos && at > 0 && at + suffix.size() == domain.size()
             ? domain.substr(0, at)
             : domain;
}

std::string Place(int rank, const SetControl& set) {
  core::RankSet members;
  for (const int member : set.members()) members.Add(core::RankSet(member));
  return "rank " + std::to_string(rank) + ": process set " + std::to_string(set.id()) + " (" +
         members.Describe({}) + ")";
}

}  // namespace

void ElsewhereWatch::Check(const Sets& sets, Nanos now) {
  if (sets.size() < 2) return;
  std::map<Key, Nanos> still;
  for (const auto& set : sets) {
    bool late = false;
    set->EachWaiting([&](Nanos since) { late |= since + kPatience <= now; });
    if (!late) continue;
    for (const SetControl::Waiting& waiting : set->WaitingGroups()) {
      Nanos since = 0;
      if (waiting.group < 0 || !set->WholeBatch(waiting.domain, &since)) continue;
      if (since + kPatience > now) continue;
      const Key key{set->id(), waiting.domain};
      still[key] = since;
      const auto asked = asked_.find(key);
      if (asked != asked_.end() && asked->second == since) continue;
      ended_.erase(key);
      side_->AskElsewhere(WhoElsewhere{rank_, set->id(), waiting.domain});
    }
  }
  asked_ = std::move(still);
}

void ElsewhereWatch::OnQuestion(const WhoElsewhere& question, const Sets& sets) {
  const Nanos now = Now();
  for (auto at = answered_.begin(); at != answered_.end();)
    at = at->second.at + kForgetAfter < now ? answered_.erase(at) : std::next(at);
  const SetControl* const set = Find(sets, question.set_id);
  if (!set || set->Has(question.domain)) return;
  const std::string name = WithoutSet(question.domain, question.set_id);
  for (const auto& other : sets) {
    if (other.get() == set || !HasMember(*other, question.asker)) continue;
    for (const std::string& other_name : {name, name + SetSuffix(other->id())}) {
      const BatchPtr batch = other->WholeBatch(other_name);
      if (!batch) continue;
      answered_[{question.set_id, question.domain}] = {batch->spec_ptr(), now};
      side_->TellElsewhere(question.asker,
                           {rank_, question.set_id, other->id(), question.domain, other_name, ""});
      return;
    }
  }
}

void ElsewhereWatch::OnAnswer(const Elsewhere& answer, const Sets& sets) {
  SetControl* const set = Find(sets, answer.set_id);
  SetControl* const other = Find(sets, answer.other_set);
  if (!set || !other) return;
  const Key key{answer.set_id, answer.domain};
  if (!answer.text.empty()) {
    const auto mine = answered_.find(key);
    if (mine == answered_.end()) return;
    const DomainSpecPtr spec = std::move(mine->second.spec);
    answered_.erase(mine);
    if (!set->Has(answer.domain)) GiveUp(set, answer.domain, *spec, answer.text);
    return;
  }
  if (rank_ > answer.rank) return;  // it asks as well
  auto ended = ended_.find(key);
  if (ended == ended_.end()) {
    const BatchPtr batch = set->WholeBatch(answer.domain);
    if (!batch || other->Has(answer.other_domain)) return;
    // As long as a datagram takes it, so that both have the same.
    const std::string text = Describe(batch->spec(), *set, answer, *other).substr(0, kLongestText);
    ended = ended_.emplace(key, std::make_pair(answer.other_set, text)).first;
    GiveUp(other, answer.other_domain, batch->spec(), text);
  }
  if (ended->second.first != answer.other_set) return;
  Elsewhere told = answer;
  told.rank = rank_;
  told.text = ended->second.second;
  side_->TellElsewhere(answer.rank, told);
}

void ElsewhereWatch::GiveUp(SetControl* set, const std::string& name, const DomainSpec& like,
                            const std::string& text) {
  auto spec = std::make_shared<DomainSpec>(like);
  spec->name = name;
  spec->process_set = set->id();
  spec->plan = nullptr;
  const BatchPtr batch = make_(spec);
  set->Open(batch);
  set->Abandon(batch, text, Kind::kMismatch);
}

std::string ElsewhereWatch::Describe(const DomainSpec& spec, const SetControl& mine,
                                     const Elsewhere& answer, const SetControl& other) const {
  return std::string(OpName(spec.entries[0].op)) + " of '" + WithoutSet(spec.name, mine.id()) +
         "': ranks call it in different process sets: " + Place(rank_, mine) + "; " +
         Place(answer.rank, other) +
         ". Every rank must call it in the same process set; give calls that do not belong "
         "together other names";
}

}  // namespace gradred::engine
