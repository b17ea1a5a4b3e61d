// Kinds of errors, and the two ways they travel: Error is thrown by synchronous code, Status
// crosses threads, processes and C callbacks.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace gradred {

// The names are those of the Python exceptions (gradred/errors.py).
enum class Kind : uint8_t {
  kOk,
  // Entry errors: the entries fail alike on all ranks, the engine stays usable.
  kInvalidArgument,
  kMismatch,   // ranks disagree
  kAbandoned,  // a rank gave up a batch: an op failed, a step raised, the rank shut down
  kUnsupported,
  // Usage.
  kNotInitialized,
  // Engine errors: they end the engine of every rank.
  kTimeout,
  kPeerLost,
  kTransportError,
  kInternal,
};

const char* KindName(Kind kind);
bool IsEngineError(Kind kind);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Kind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
  bool ok() const { return kind_ == Kind::kOk; }
  Kind kind() const { return kind_; }
  const std::string& message() const { return message_; }
  // "Mismatch: allreduce of 'loss': ..."
  std::string ToString() const;

 private:
  Kind kind_ = Kind::kOk;
  std::string message_;
};

class Error : public std::runtime_error {
 public:
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  explicit Error(const Status& status) : Error(status.kind(), status.message()) {}
  Kind kind() const { return kind_; }
  Status status() const { return {kind_, what()}; }

 private:
  Kind kind_;
};

// The exception in flight as a Status: Error keeps its kind, anything else is kInternal. Call it in
// a catch block.
Status CurrentException();

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace gradred
