#include "comm/shm/segment.h"

#include <string>

#include "base/status.h"

namespace gradred::comm::shm {

char* Attachments::Find(int peer, const MemoryKey& key) {
  const std::pair<int, uint64_t> name{peer, key.id};
  const auto found = attached_.find(name);
  if (found != attached_.end()) {
    if (found->second->nbytes() == key.nbytes) return found->second->data();
    throw Error(Kind::kTransportError,
                "memory of process " + std::to_string(key.pid) + ": attached with " +
                    std::to_string(found->second->nbytes()) + " bytes, now said to have " +
                    std::to_string(key.nbytes));
  }
  for (auto it = attached_.begin(); it != attached_.end();) {
    it = it->second->discarded() ? attached_.erase(it) : std::next(it);
  }
  return attached_.emplace(name, Memory::Attach(key)).first->second->data();
}

}  // namespace gradred::comm::shm
