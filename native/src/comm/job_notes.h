// What the ranks of a machine leave for each other in the folder that `gradred run` makes for a
// job: how a rank's process ended (rank-<r>, by its parent), and why a rank could not open the
// world (failed-<r>-<opening>, by itself). For the time in which ranks have no other way to talk.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace gradred::comm {

class JobNotes {
 public:
  // An empty folder: there are no notes.
  explicit JobNotes(std::string folder) : folder_(std::move(folder)) {}
  static JobNotes OfJob();  // GRADRED_JOB_DIR

  bool exist() const { return !folder_.empty(); }
  // "signal 9 (SIGKILL)", "exit code 3"; empty: it has not ended, or nobody says how.
  std::string EndOf(int rank) const;
  // `opening`: each rank counts how often it has opened a world, so that what was wrong with an
  // earlier one is no news.
  void TellFailure(int rank, int opening, const Status& cause) const;
  std::optional<Status> FailureOf(int rank, int opening) const;
  // Ranks of which there is any note, in the order of their first ones: a cause comes before what
  // it has caused.
  std::vector<int> Ranks() const;

 private:
  std::string folder_;
};

// Whom a rank waits for while it opens a world, by the launcher's numbers.
struct Awaited {
  int rank = -1;           // this one
  std::vector<int> ranks;  // empty: all
  // Some of these need not come (a communicator of theirs was given): only ranks that ended badly
  // count, since the others may wait for them in MPI.
  bool some = false;
};

// Why the world cannot open, as soon as that is known: an awaited rank has ended or failed.
using OpeningCheck = std::function<std::optional<Status>()>;
OpeningCheck CheckOf(JobNotes notes, Awaited awaited, int opening);

}  // namespace gradred::comm
