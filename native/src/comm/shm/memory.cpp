#include "comm/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "base/status.h"
#include "comm/shm/room.h"

namespace gradred::comm::shm {
namespace {

constexpr int64_t kHeaderNbytes = 4096;          // keeps data() page-aligned
constexpr uint64_t kMagic = 0x4752414452454431;  // "GRADRED1"

std::string Reason(int error) { return std::strerror(error); }

std::string Megabytes(int64_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(nbytes) / 1e6);
  return text;
}

[[noreturn]] void ThrowNoRoom(const std::string& purpose, int64_t wanted, const Room& room,
                              const std::string& why) {
  throw Error(Kind::kUnsupported,
              "no shared memory for " + purpose + ": wanted " + std::to_string(wanted) +
                  " bytes (" + Megabytes(wanted) + "), free " + std::to_string(room.nbytes) +
                  " bytes (" + Megabytes(room.nbytes) + ") by " + room.where + why +
                  "; run fewer ranks on the machine, use smaller groups, or raise that limit "
                  "(containers: --shm-size, --memory)");
}

std::string NameOf(uint64_t nonce, int32_t pid, uint64_t id) {
  char text[80];
  std::snprintf(text, sizeof text, "/gradred-%016llx-%d-%llu",
                static_cast<unsigned long long>(nonce), pid, static_cast<unsigned long long>(id));
  return text;
}

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

// In steps, so that a periodic signal (a profiler) cannot make it start over for ever.
int Allocate(int fd, int64_t nbytes) {
  constexpr int64_t kStep = 16 << 20;
  for (int64_t at = 0; at < nbytes;) {
    const int64_t step = std::min(kStep, nbytes - at);
    const int error = posix_fallocate(fd, at, step);
    if (error != 0 && error != EINTR) return error;
    if (error == 0) at += step;
  }
  return 0;
}

}  // namespace

struct Memory::Header {
  uint64_t magic, nonce, id;
  int64_t nbytes;
  int32_t attachers;
  std::atomic<int32_t> attached;
  std::atomic<uint32_t> discarded;
};

std::unique_ptr<Memory> Memory::Create(int64_t nbytes, uint64_t nonce, Naming naming, int attachers,
                                       const std::string& purpose) {
  const int64_t total = nbytes + kHeaderNbytes;
  const Room room = FindRoom(naming == Naming::kNamed);
  if (total > room.nbytes) ThrowNoRoom(purpose, total, room, "");

  std::unique_ptr<Memory> memory(new Memory);
  memory->created_ = true;
  memory->mapped_by_ = getpid();
  memory->key_.nonce = nonce;
  memory->key_.id = NextId();
  memory->key_.nbytes = nbytes;
  memory->key_.pid = getpid();
  if (naming == Naming::kAnonymous) {
    memory->fd_ = memfd_create("gradred", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  } else {
    const std::string name = NameOf(nonce, getpid(), memory->key_.id);
    memory->fd_ = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (memory->fd_ >= 0) memory->name_ = name;
  }
  if (memory->fd_ < 0) {
    throw Error(Kind::kUnsupported,
                "cannot create shared memory for " + purpose + ": " + Reason(errno));
  }
  if (const int error = Allocate(memory->fd_, total)) {
    ThrowNoRoom(purpose, total, FindRoom(naming == Naming::kNamed), ": " + Reason(error));
  }
  if (naming == Naming::kAnonymous) {
    // A peer that cut the file would turn our accesses into SIGBUS.
    if (fcntl(memory->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw Error(Kind::kUnsupported,
                  "cannot seal shared memory for " + purpose + ": " + Reason(errno));
    }
    memory->key_.fd = memory->fd_;
  }
  struct stat file{};
  if (fstat(memory->fd_, &file) == 0) memory->key_.inode = file.st_ino;
  memory->Map(purpose);
  Header* header = new (memory->base_) Header{};
  header->nonce = nonce;
  header->id = memory->key_.id;
  header->nbytes = nbytes;
  header->attachers = attachers;
  header->magic = kMagic;
  if (attachers == 0) memory->Unlink();
  return memory;
}

std::unique_ptr<Memory> Memory::Attach(const MemoryKey& key) {
  std::unique_ptr<Memory> memory(new Memory);
  memory->key_ = key;
  memory->mapped_by_ = getpid();
  const std::string name = NameOf(key.nonce, key.pid, key.id);
  const std::string path =
      key.fd >= 0 ? "/proc/" + std::to_string(key.pid) + "/fd/" + std::to_string(key.fd)
                  : "/dev/shm" + name;
  const std::string purpose = "memory of process " + std::to_string(key.pid) + " (" + path + ")";
  memory->fd_ = key.fd >= 0 ? open(path.c_str(), O_RDWR | O_CLOEXEC)
                            : shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (memory->fd_ < 0) {
    throw Error(Kind::kTransportError, "cannot attach " + purpose + ": " + Reason(errno));
  }
  struct stat file{};
  if (fstat(memory->fd_, &file) != 0 || file.st_ino != key.inode ||
      file.st_size != key.nbytes + kHeaderNbytes) {
    throw Error(Kind::kTransportError,
                "cannot attach " + purpose + ": expected inode " + std::to_string(key.inode) +
                    " of " + std::to_string(key.nbytes + kHeaderNbytes) + " bytes, got inode " +
                    std::to_string(file.st_ino) + " of " + std::to_string(file.st_size) + " bytes");
  }
  memory->Map(purpose);
  close(memory->fd_);
  memory->fd_ = -1;
  Header* header = memory->header();
  if (header->magic != kMagic || header->nonce != key.nonce || header->id != key.id) {
    throw Error(Kind::kTransportError, "cannot attach " + purpose + ": it belongs to another job");
  }
  const bool last = header->attached.fetch_add(1) + 1 == header->attachers;
  if (key.fd < 0 && last) shm_unlink(name.c_str());
  return memory;
}

void Memory::Map(const std::string& purpose) {
  const int64_t total = key_.nbytes + kHeaderNbytes;
  // Populated: all pages exist already, and one call is cheaper than a fault a page.
  void* base = mmap(nullptr, static_cast<size_t>(total), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (base == MAP_FAILED) {
    throw Error(Kind::kUnsupported,
                "cannot map " + std::to_string(total) + " bytes of shared memory for " + purpose +
                    ": " + Reason(errno) + "; raise the limit of address space (ulimit -v)");
  }
  base_ = static_cast<char*>(base);
}

void Memory::Unlink() {
  if (!name_.empty()) shm_unlink(name_.c_str());
  name_.clear();
}

Memory::~Memory() {
  if (getpid() != mapped_by_) return;
  // The last peer may have unlinked it already, and the name holds our pid and is never used twice.
  Unlink();
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(key_.nbytes + kHeaderNbytes));
  if (fd_ >= 0) close(fd_);
}

char* Memory::data() const { return base_ + kHeaderNbytes; }

void Memory::Discard() {
  if (getpid() != mapped_by_) return;
  header()->discarded.store(1, std::memory_order_release);
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kHeaderNbytes, key_.nbytes);
}

bool Memory::discarded() const { return header()->discarded.load(std::memory_order_acquire) != 0; }

}  // namespace gradred::comm::shm
