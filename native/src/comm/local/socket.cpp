#include "comm/local/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/status.h"

namespace gradred::comm::local {
namespace {

constexpr uint64_t kLongest = uint64_t{1} << 32;

sockaddr_un AddressOf(const std::string& name, socklen_t* nbytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), n);  // a leading 0: an abstract name
  *nbytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

[[noreturn]] void ThrowErrno(const std::string& what) {
  throw Error(Kind::kTransportError,
              "meeting on this machine: " + what + ": " + std::strerror(errno));
}

int NewSocket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) ThrowErrno("cannot open a socket");
  return fd;
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket Socket::Listen(const std::string& name, int backlog) {
  Socket socket(NewSocket());
  socklen_t nbytes = 0;
  const sockaddr_un address = AddressOf(name, &nbytes);
  if (bind(socket.fd_, reinterpret_cast<const sockaddr*>(&address), nbytes) != 0) {
    if (errno == EADDRINUSE) {
      throw Error(Kind::kInvalidArgument,
                  "rank 0: another rank 0 of this job is there already (socket @" + name +
                      "); give each job its own GRADRED_JOB and each rank its own "
                      "GRADRED_LOCAL_RANK");
    }
    ThrowErrno("cannot bind the socket @" + name);
  }
  if (listen(socket.fd_, backlog) != 0) ThrowErrno("cannot listen on the socket @" + name);
  return socket;
}

Socket Socket::TryConnect(const std::string& name) {
  Socket socket(NewSocket());
  socklen_t nbytes = 0;
  const sockaddr_un address = AddressOf(name, &nbytes);
  if (connect(socket.fd_, reinterpret_cast<const sockaddr*>(&address), nbytes) == 0) return socket;
  if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR && errno != ENOENT) {
    ThrowErrno("cannot connect to the socket @" + name);
  }
  return Socket();
}

Socket Socket::Accept() {
  const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    ThrowErrno("cannot accept");
  }
  return Socket(fd);
}

bool Socket::PeerIsSameUser() const {
  ucred peer{};
  socklen_t nbytes = sizeof peer;
  return getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &peer, &nbytes) == 0 && peer.uid == geteuid();
}

bool Socket::WaitFor(short events, Nanos deadline) const {
  while (true) {
    const Nanos left = deadline - Now();
    if (left <= 0) return false;
    pollfd entry{fd_, events, 0};
    const int ms = static_cast<int>(std::min<Nanos>(left / kMillisecond + 1, 60'000));
    if (poll(&entry, 1, ms) > 0) return true;
  }
}

bool Socket::Move(char* data, size_t nbytes, bool send, Nanos deadline) {
  for (size_t at = 0; at < nbytes;) {
    const ssize_t n = send ? ::send(fd_, data + at, nbytes - at, MSG_NOSIGNAL)
                           : recv(fd_, data + at, nbytes - at, 0);
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (n == 0 || errno == EPIPE || errno == ECONNRESET) {
      return false;
    } else if (errno == EAGAIN) {
      if (!WaitFor(send ? POLLOUT : POLLIN, deadline)) {
        throw Error(Kind::kTimeout, "meeting on this machine: no answer within the time to open");
      }
    } else if (errno != EINTR) {
      ThrowErrno(send ? "cannot send" : "cannot receive");
    }
  }
  return true;
}

bool Socket::Send(const std::string& bytes, Nanos deadline) {
  uint64_t nbytes = bytes.size();
  return Move(reinterpret_cast<char*>(&nbytes), sizeof nbytes, true, deadline) &&
         Move(const_cast<char*>(bytes.data()), bytes.size(), true, deadline);
}

bool Socket::Receive(std::string* bytes, Nanos deadline) {
  uint64_t nbytes = 0;
  if (!Move(reinterpret_cast<char*>(&nbytes), sizeof nbytes, false, deadline)) return false;
  if (nbytes > kLongest) {
    throw Error(Kind::kTransportError,
                "meeting on this machine: a message of " + std::to_string(nbytes) + " bytes");
  }
  bytes->resize(nbytes);
  return Move(bytes->data(), bytes->size(), false, deadline);
}

bool Socket::Closed() const {
  char byte;
  const ssize_t n = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace gradred::comm::local
