// A job on one machine without MPI: the ranks meet at a socket, shared memory carries everything
// else.
#include "comm/fabric.h"

#include <cerrno>
#include <cstdlib>

#include "base/status.h"
#include "comm/local/meeting.h"

namespace gradred::comm {
namespace {

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == 0) {
    throw Error(Kind::kInvalidArgument,
                std::string("transport 'local' needs the variable ") + name +
                    "; start the ranks with `gradred run --transport local`, or set "
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

}  // namespace

std::unique_ptr<Fabric> OpenLocalFabric(const WorldOptions& options) {
  // One rank by itself has nobody to meet.
  if (options.transport == "self") {
    return std::make_unique<LocalFabric>(local::Meet("", 0, 1, kForever));
  }
  const int rank = NumberOf("GRADRED_LOCAL_RANK"), size = NumberOf("GRADRED_LOCAL_SIZE");
  const std::string job = size > 1 ? Variable("GRADRED_JOB") : "";
  return std::make_unique<LocalFabric>(local::Meet(job, rank, size, Now() + options.timeout));
}

}  // namespace gradred::comm
