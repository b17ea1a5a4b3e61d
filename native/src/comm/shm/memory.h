// Memory that processes of one machine share: a rank creates it alone, the others attach when they
// first need it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace gradred::comm::shm {

// Note [Lifetime of shared memory]
// Memory is anonymous (memfd_create) and peers open it as /proc/<pid>/fd/<n>, so nothing can
// outlive the processes, however they end, and neither creating nor attaching needs the other side
// to do anything: the fusion buffer may grow while the peers are busy elsewhere. Where /proc
// refuses that (a hardened container), memory has a name in /dev/shm (mode 0600, never one that
// exists, with the job's nonce) from its creation until the last peer has attached; a rank killed
// in between leaves it.
enum class Naming { kAnonymous, kNamed };

// What a peer needs to find the memory. Plain bytes: it travels in messages.
struct MemoryKey {
  uint64_t nonce = 0;  // of the job
  uint64_t id = 0;     // never used twice by a process
  uint64_t inode = 0;
  int64_t nbytes = 0;  // without the header
  int32_t pid = 0;
  int32_t fd = -1;  // -1: named
};

// Destroyed in a forked child, it does nothing.
class Memory {
 public:
  // Zeroed and taken from the system at once: using it can neither fail nor raise SIGBUS.
  // `attachers`: how many peers will attach at most. Throws kUnsupported naming purpose, size
  // wanted, size free and remedy when there is no room.
  static std::unique_ptr<Memory> Create(int64_t nbytes, uint64_t nonce, Naming naming,
                                        int attachers, const std::string& purpose);
  // Throws kTransportError naming process and reason.
  static std::unique_ptr<Memory> Attach(const MemoryKey& key);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const;  // page-aligned
  int64_t nbytes() const { return key_.nbytes; }
  const MemoryKey& key() const { return key_; }

  // By the creator, when no process touches the contents any more: gives the pages back although
  // peers still have them mapped.
  void Discard();
  bool discarded() const;

 private:
  struct Header;
  Memory() = default;
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  void Map(const std::string& purpose);
  void Unlink();

  MemoryKey key_;
  char* base_ = nullptr;
  int fd_ = -1;
  pid_t mapped_by_ = 0;
  bool created_ = false;
  std::string name_;  // in /dev/shm; empty once unlinked
};

}  // namespace gradred::comm::shm
