// Blocking messages over a unix socket, with a deadline.
#pragma once

#include <string>

#include "base/clock.h"

namespace gradred::comm::local {

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;

  // Null name on the machine, not in the file system. Throws kInvalidArgument when the name is in
  // use.
  static Socket Listen(const std::string& name, int backlog);
  // Once; an empty Socket when nobody listens (yet).
  static Socket TryConnect(const std::string& name);

  explicit operator bool() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  Socket Accept();  // an empty Socket when nobody waits
  bool PeerIsSameUser() const;

  // One message. False when the other side has closed; throws kTimeout at the deadline.
  bool Send(const std::string& bytes, Nanos deadline);
  bool Receive(std::string* bytes, Nanos deadline);
  // The other side has closed, and nothing is left to receive.
  bool Closed() const;

 private:
  bool WaitFor(short events, Nanos deadline) const;
  bool Move(char* data, size_t nbytes, bool send, Nanos deadline);

  int fd_;
};

}  // namespace gradred::comm::local
