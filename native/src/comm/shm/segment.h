// A rank's own memory for reductions, which its peers read and write in place.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "comm/shm/memory.h"

namespace gradred::comm::shm {

class SharedSegment final : public Segment {
 public:
  explicit SharedSegment(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}
  // Gives the pages back at once, although peers may have them mapped until they attach something
  // new.
  ~SharedSegment() override { memory_->Discard(); }

  void* data() override { return memory_->data(); }
  int64_t nbytes() const override { return memory_->nbytes(); }
  Space space() const override { return Space::kShared; }
  const MemoryKey& key() const { return memory_->key(); }

 private:
  std::unique_ptr<Memory> memory_;
};

// The peers' segments that this rank has attached.
class Attachments {
 public:
  // The start of the memory; attaches it at the first call, and then lets go of all that its owners
  // have freed.
  char* Find(int peer, const MemoryKey& key);
  size_t size() const { return attached_.size(); }

 private:
  std::map<std::pair<int, uint64_t>, std::unique_ptr<Memory>> attached_;  // by peer and id
};

}  // namespace gradred::comm::shm
