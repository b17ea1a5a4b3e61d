// Warns, and if asked to fails, when work that is complete here waits for ranks that have not
// submitted it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/set_control.h"
#include "engine/side_channel.h"

namespace gradred::engine {

class StallWatch {
 public:
  StallWatch(int rank, Nanos warn, Nanos fail, SideChannel* side)
      : rank_(rank), warn_(warn), fail_(fail), side_(side) {}

  // Asks who lacks shortly before a limit passes, and reports when it has passed. Returns the error
  // that ends the engine when the fail limit has passed.
  std::optional<Status> Check(const std::vector<std::unique_ptr<SetControl>>& sets, Nanos now);
  // When Check should run next, after `now`; kForever when nothing waits.
  Nanos NextWake(const std::vector<std::unique_ptr<SetControl>>& sets, Nanos now) const;

  bool awaits_answers() const;

  void OnQuestion(const WhoLacks& question, const std::vector<std::unique_ptr<SetControl>>& sets,
                  Nanos now);
  void OnAnswer(const ILack& answer);

 private:
  struct Stall {
    int group = 0;
    Nanos since = 0;
    bool asked_warn = false, asked_fail = false, warned = false, asked_by_peer = false;
    std::map<int, std::string> lacking;  // rank -> what it waits for
  };
  using Key = std::pair<int, Digest>;  // set, domain
  std::string Describe(const SetControl& set, const SetControl::Waiting& waiting,
                       const Stall& stall, Nanos now) const;

  const int rank_;
  const Nanos warn_, fail_;
  SideChannel* const side_;
  std::map<Key, Stall> stalls_;
};

}  // namespace gradred::engine
