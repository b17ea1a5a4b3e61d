// A job on one machine without MPI: the ranks meet at a socket, shared memory carries everything
// else.
#include "comm/fabric.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/local/meeting.h"

namespace gradred::comm {
namespace {

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == 0) {
    throw Error(Kind::kInvalidArgument,
                std::string("transport 'local' needs the variable ") + name +
                    "; start the ranks with `gradred run --launcher local`, or set "
                    "GRADRED_LOCAL_RANK, GRADRED_LOCAL_SIZE and one random GRADRED_JOB for all");
  }
  return value;
}

int NumberOf(const char* name) {
  const char* value = Variable(name);
  char* end = nullptr;
  errno = 0;
  const long number = std::strtol(value, &end, 10);
  if (errno != 0 || *end != 0 || number < 0 || number > 1'000'000) {
    throw Error(Kind::kInvalidArgument,
                std::string(name) + ": expected a small whole number, got '" + value + "'");
  }
  return static_cast<int>(number);
}

class LocalFabric final : public Fabric {
 public:
  explicit LocalFabric(std::unique_ptr<Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}
  Bootstrap& bootstrap() override { return *bootstrap_; }
  std::unique_ptr<Transport> MakeTransport(Traffic) override { return nullptr; }
  std::string Describe() const override { return "one machine without MPI"; }
  void Close() override {}
  void Abort() override {}

 private:
  std::unique_ptr<Bootstrap> bootstrap_;
};

struct Place {
  int rank, size;
  std::string suffix;  // to the job's name: other ranks may meet at the same time
};

// The place of rank `rank` of `size` in a list of them, as MPI numbers them.
Place PlaceIn(const std::vector<int>& ranks, int rank, int size) {
  std::string list;
  for (const int r : ranks) list += (list.empty() ? "" : ", ") + std::to_string(r);
  const std::set<int> members(ranks.begin(), ranks.end());
  if (members.size() != ranks.size() || *members.begin() < 0 || *members.rbegin() >= size) {
    throw Error(Kind::kInvalidArgument, "ranks [" + list + "]: expected ranks of the job's " +
                                            std::to_string(size) + ", from 0, each once");
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), rank);
  if (mine == ranks.end()) {
    throw Error(Kind::kInvalidArgument,
                "rank " + std::to_string(rank) + " of the job is not in ranks [" + list + "]");
  }
  return {static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()),
          " [" + list + "]"};
}

}  // namespace

int LocalLauncherSize() {
  return std::getenv("GRADRED_LOCAL_SIZE") == nullptr ? 0 : NumberOf("GRADRED_LOCAL_SIZE");
}

std::unique_ptr<Fabric> OpenLocalFabric(const WorldOptions& options, const OpeningCheck& check) {
  // One rank by itself has nobody to meet.
  const bool alone = options.transport == "self";
  const int rank = alone ? 0 : NumberOf("GRADRED_LOCAL_RANK");
  const int size = alone ? 1 : NumberOf("GRADRED_LOCAL_SIZE");
  const Place place =
      options.ranks.empty() ? Place{rank, size, ""} : PlaceIn(options.ranks, rank, size);
  const std::string job = place.size > 1 ? Variable("GRADRED_JOB") + place.suffix : "";
  return std::make_unique<LocalFabric>(
      local::Meet(job, place.rank, place.size, Now() + options.timeout, check));
}

}  // namespace gradred::comm
