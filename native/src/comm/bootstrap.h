// How ranks meet before they have a transport: by MPI, by a socket of the node, or (threads) by
// memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace gradred::comm {

// Blocking and collective; used only while a world opens. Throws kTimeout or kTransportError.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Every rank's bytes, in rank order.
  virtual std::vector<std::string> AllGather(const std::string& mine) = 0;
};

// Identity of the machine and of its shared memory: hostname, boot id and IPC/PID namespaces.
std::string HostId();

}  // namespace gradred::comm
