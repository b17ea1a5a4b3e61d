// Finds calls of one name that ranks make in different process sets, which would wait for each
// other for ever, and fails them. Belongs to whoever steps the control loop.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/set_control.h"
#include "engine/side_channel.h"

namespace gradred::engine {

// Note [One name in different process sets]
// A rank whose batch has waited for five seconds asks who brings its domain in another set. Where
// rank a waits in set S for rank b, b in set T for a, and both are members of both, the lower of
// the two makes an end: it tells the other, and each opens a batch of the domain in the set that it
// did not call and gives it up at once, with the same text. So the batches of both sets fail on all
// of their members by the protocol's ordinary way, and the ranks' batches still count alike. A rank
// that has come to the other set's call meanwhile does nothing.
class ElsewhereWatch {
 public:
  using MakeBatch = std::function<BatchPtr(const DomainSpecPtr&)>;
  using Sets = std::vector<std::unique_ptr<SetControl>>;

  ElsewhereWatch(int rank, SideChannel* side, MakeBatch make)
      : rank_(rank), side_(side), make_(std::move(make)) {}

  void Check(const Sets& sets, Nanos now);
  void OnQuestion(const WhoElsewhere& question, const Sets& sets);
  void OnAnswer(const Elsewhere& answer, const Sets& sets);

 private:
  using Key = std::pair<int, std::string>;  // set, domain
  void GiveUp(SetControl* set, const std::string& name, const DomainSpec& like,
              const std::string& text);
  std::string Describe(const DomainSpec& spec, const SetControl& mine, const Elsewhere& answer,
                       const SetControl& other) const;

  const int rank_;
  SideChannel* const side_;
  const MakeBatch make_;
  std::map<Key, Nanos> asked_;                        // of batches that wait: since when
  std::map<Key, std::pair<int, std::string>> ended_;  // of those: the other set, and the text
  struct Brought {
    DomainSpecPtr spec;
    Nanos at = 0;
  };
  std::map<Key, Brought> answered_;  // what was brought in another set, and when it was asked for
};

}  // namespace gradred::engine
