#include "comm/shm/segment.h"

namespace gradred::comm::shm {

char* Attachments::Find(int peer, const MemoryKey& key) {
  const std::pair<int, uint64_t> name{peer, key.id};
  const auto found = attached_.find(name);
  if (found != attached_.end()) return found->second->data();
  for (auto it = attached_.begin(); it != attached_.end();) {
    it = it->second->discarded() ? attached_.erase(it) : std::next(it);
  }
  return attached_.emplace(name, Memory::Attach(key)).first->second->data();
}

}  // namespace gradred::comm::shm
