#include "comm/shm/room.h"

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace gradred::comm::shm {
namespace {

void Limit(Room* room, int64_t nbytes, const std::string& where) {
  if (nbytes < room->nbytes) *room = {std::max<int64_t>(nbytes, 0), where};
}

// A file that holds one number; false for "max", an absent file and anything else.
bool ReadNumber(const std::string& path, int64_t* value) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *value);
}

// The value after `key` in lines of "key value ..."; 0 when absent.
int64_t ReadField(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line, word;
  int64_t value = 0;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    if (fields >> word >> value && word == key) return value;
  }
  return 0;
}

// One control group and all above it. Pages of files count as used there but are given back on
// demand.
void LimitByGroup(Room* room, const std::string& root, std::string group, const char* max,
                  const char* used, const char* prefix) {
  while (true) {
    const std::string folder = root + group;
    int64_t limit = 0, now = 0;
    if (ReadNumber(folder + "/" + max, &limit) && ReadNumber(folder + "/" + used, &now)) {
      const std::string stat = folder + "/memory.stat";
      const int64_t cache = ReadField(stat, std::string(prefix) + "inactive_file") +
                            ReadField(stat, std::string(prefix) + "active_file");
      Limit(room, limit - std::max<int64_t>(now - cache, 0), "the control group " + folder);
    }
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return;
    group.erase(slash);
  }
}

void LimitByGroups(Room* room) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "id:controllers:/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers.empty()) {
      LimitByGroup(room, "/sys/fs/cgroup", group, "memory.max", "memory.current", "");
    } else if (controllers == "memory") {
      LimitByGroup(room, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                   "memory.usage_in_bytes", "total_");
    }
  }
}

}  // namespace

Room FindRoom(bool named) {
  Room room;
  const int64_t available = ReadField("/proc/meminfo", "MemAvailable:");
  if (available > 0) {
    const int64_t swap = ReadField("/proc/meminfo", "SwapFree:");
    Limit(&room, (available + swap) * 1024, "the memory of this machine");
  }
  LimitByGroups(&room);
  rlimit files{};  // beyond it ftruncate raises SIGXFSZ, which ends the process
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY) {
    Limit(&room, static_cast<int64_t>(files.rlim_cur), "the limit of file sizes (ulimit -f)");
  }
  struct statvfs device{};
  if (named && statvfs("/dev/shm", &device) == 0) {
    Limit(&room, static_cast<int64_t>(device.f_bavail) * static_cast<int64_t>(device.f_frsize),
          "/dev/shm");
  }
  return room;
}

}  // namespace gradred::comm::shm
