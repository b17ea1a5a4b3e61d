#include "comm/bootstrap.h"

#include <unistd.h>

#include <fstream>

namespace gradred::comm {
namespace {

std::string NamespaceOf(const char* name) {
  char target[128];
  const ssize_t n = readlink((std::string("/proc/self/ns/") + name).c_str(), target, sizeof target);
  return n > 0 ? std::string(target, static_cast<size_t>(n)) : "";
}

}  // namespace

std::string HostId() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::string(name) + " " + boot + " " + NamespaceOf("ipc") + " " + NamespaceOf("pid");
}

}  // namespace gradred::comm
