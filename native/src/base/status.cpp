#include "base/status.h"

namespace gradred {

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kOk:
      return "Ok";
    case Kind::kInvalidArgument:
      return "InvalidArgument";
    case Kind::kMismatch:
      return "Mismatch";
    case Kind::kAbandoned:
      return "Abandoned";
    case Kind::kUnsupported:
      return "Unsupported";
    case Kind::kNotInitialized:
      return "NotInitialized";
    case Kind::kTimeout:
      return "Timeout";
    case Kind::kPeerLost:
      return "PeerLost";
    case Kind::kTransportError:
      return "TransportError";
    case Kind::kInternal:
      return "Internal";
  }
  return "Unknown";
}

bool IsEngineError(Kind kind) {
  return kind == Kind::kTimeout || kind == Kind::kPeerLost || kind == Kind::kTransportError ||
         kind == Kind::kInternal;
}

std::string Status::ToString() const {
  return ok() ? "Ok" : std::string(KindName(kind_)) + ": " + message_;
}

Status CurrentException() {
  try {
    throw;
  } catch (const Error& e) {
    return e.status();
  } catch (const std::exception& e) {
    return {Kind::kInternal, e.what()};
  } catch (...) {
    return {Kind::kInternal, "unknown exception"};
  }
}

}  // namespace gradred
