// What the ranks of one machine share besides segments: who they are, their bells, and the rings
// between them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/doorbell.h"
#include "comm/shm/memory.h"
#include "comm/shm/ring.h"

namespace gradred::comm::shm {

constexpr int kTransports = 4;  // control, data, side, diff

enum class MemberState : uint32_t { kOpen, kClosed, kFailed };

// Zero-initialised memory is an open member.
struct Member {
  DoorbellWord bells[kTransports];
  alignas(64) std::atomic<uint32_t> state{0};
  char cause[444];  // text of the engine error, ended by 0; written before kFailed
};
static_assert(sizeof(Member) == (kTransports + 7) * 64);

struct PageOptions {
  int64_t ring_nbytes = 0;  // a power of two, at least 64; 0: by the number of ranks
};

// Made by one rank of the machine, attached by the others; members are numbered by the order of
// their ranks there.
class Page {
 public:
  static std::shared_ptr<Page> Create(int members, uint64_t nonce, Naming naming,
                                      const PageOptions& options = {});
  static std::shared_ptr<Page> Attach(const MemoryKey& key);
  // For a rank alone on its machine: needs nothing from the system.
  static std::shared_ptr<Page> Private(uint64_t nonce);
  ~Page();

  MemoryKey key() const;
  uint64_t nonce() const { return header()->nonce; }
  // How segments of these ranks are shared: as the page itself.
  Naming naming() const;
  int members() const { return header()->members; }
  int64_t ring_nbytes() const { return header()->ring_nbytes; }
  Member& member(int index);
  RingHeader* ring(int transport, int from, int to);

  // Says how member `index` left. Does nothing in a forked child.
  void Leave(int index, MemberState state, const std::string& cause);

 private:
  struct Header {
    uint64_t nonce;
    int32_t members;
    int32_t unused;
    int64_t ring_nbytes;
  };
  Page() = default;
  static int64_t NbytesFor(int members, int64_t ring_nbytes);
  Header* header() const { return reinterpret_cast<Header*>(data_); }

  std::unique_ptr<Memory> memory_;  // null: private
  char* data_ = nullptr;
  pid_t pid_ = 0;
};

}  // namespace gradred::comm::shm
