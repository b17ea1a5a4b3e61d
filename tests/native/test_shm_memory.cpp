// Memory of several processes: who gets it, what happens when there is no room, and that nothing is
// left.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "base/status.h"
#include "comm/shm/communicator.h"
#include "comm/shm/memory.h"
#include "comm/shm/page.h"
#include "comm/shm/room.h"
#include "comm/shm/segment.h"
#include "comm/shm/transport.h"
#include "processes.h"

using namespace gradred;
using namespace gradred::comm;

namespace {

// The nonce is in every name: other jobs on the machine do not disturb the tests.
uint64_t Nonce() { return 0x7e57000000000000 + static_cast<uint64_t>(getpid()); }

int NamesInDevShm(uint64_t nonce) {
  char part[32];
  std::snprintf(part, sizeof part, "%016llx", static_cast<unsigned long long>(nonce));
  int count = 0;
  DIR* folder = opendir("/dev/shm");
  CHECK(folder != nullptr);
  while (const dirent* entry = readdir(folder))
    count += std::strstr(entry->d_name, part) != nullptr;
  closedir(folder);
  return count;
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Of this process, in kB.
int64_t SharedKilobytes() {
  const std::string status = ReadAll("/proc/self/status");
  return std::strtoll(status.c_str() + status.find("RssShmem:") + 9, nullptr, 10);
}

// Bytes that a file holds, whoever maps it.
int64_t BlocksOf(const shm::MemoryKey& key) {
  struct stat file{};
  const std::string path = "/proc/" + std::to_string(key.pid) + "/fd/" + std::to_string(key.fd);
  CHECK(stat(path.c_str(), &file) == 0);
  return file.st_blocks * 512;
}

}  // namespace

TEST(PeersSeeTheSameBytes) {
  for (const auto naming : {shm::Naming::kAnonymous, shm::Naming::kNamed}) {
    const uint64_t nonce = Nonce();
    const auto memory = shm::Memory::Create(100'000, nonce, naming, 2, "a test");
    CHECK_EQ(memory->data()[99'999], 0);
    std::memcpy(memory->data(), "from the owner", 15);
    testing::RunProcesses(2, [&](int rank) {
      const auto attached = shm::Memory::Attach(memory->key());
      CHECK_EQ(attached->nbytes(), 100'000);
      CHECK_EQ(std::string(attached->data()), "from the owner");
      attached->data()[1000 + rank] = 'x';
    });
    CHECK_EQ(memory->data()[1000], 'x');
    CHECK_EQ(memory->data()[1001], 'x');
    CHECK_EQ(NamesInDevShm(nonce), 0);  // all have attached
  }
}

TEST(NamedMemoryIsExclusiveAndPrivateToTheUser) {
  const uint64_t nonce = Nonce();
  auto memory = shm::Memory::Create(10, nonce, shm::Naming::kNamed, 1, "a test");
  CHECK_EQ(NamesInDevShm(nonce), 1);
  char name[96];
  std::snprintf(name, sizeof name, "/gradred-%016llx-%d-%llu",
                static_cast<unsigned long long>(nonce), getpid(),
                static_cast<unsigned long long>(memory->key().id));
  const int fd = shm_open(name, O_RDWR, 0);
  struct stat file{};
  CHECK(fd >= 0 && fstat(fd, &file) == 0);
  close(fd);
  CHECK_EQ(file.st_mode & 0777, 0600U);
  memory.reset();
  CHECK_EQ(NamesInDevShm(nonce), 0);
}

TEST(MemoryCannotShrink) {
  const auto memory = shm::Memory::Create(8192, 1, shm::Naming::kAnonymous, 1, "a test");
  CHECK(ftruncate(memory->key().fd, 0) != 0);
  memory->data()[8191] = 1;
}

TEST(AStrangersMemoryIsRefused) {
  const auto memory = shm::Memory::Create(8192, 1, shm::Naming::kAnonymous, 1, "a test");
  shm::MemoryKey key = memory->key();
  key.inode += 1;
  CHECK_ERROR(shm::Memory::Attach(key), Kind::kTransportError, "inode");
  key = memory->key();
  key.nbytes += 1;
  CHECK_ERROR(shm::Memory::Attach(key), Kind::kTransportError, "of 12289 bytes, got");
  key = memory->key();
  key.nonce = 2;
  CHECK_ERROR(shm::Memory::Attach(key), Kind::kTransportError, "another job");
  key = memory->key();
  key.fd = 1'000'000;
  CHECK_ERROR(shm::Memory::Attach(key), Kind::kTransportError, "No such file");
}

TEST(TooMuchIsAnErrorWithSizes) {
  constexpr int64_t kPetabyte = int64_t{1} << 50;
  for (const auto naming : {shm::Naming::kAnonymous, shm::Naming::kNamed}) {
    const uint64_t nonce = Nonce();
    CHECK_ERROR(shm::Memory::Create(kPetabyte, nonce, naming, 1, "the fusion buffer of rank 3"),
                Kind::kUnsupported,
                "fusion buffer of rank 3: wanted " + std::to_string(kPetabyte + 4096) + " bytes");
    CHECK_EQ(NamesInDevShm(nonce), 0);
  }
  CHECK(shm::FindRoom(false).nbytes < kPetabyte);
  CHECK(shm::FindRoom(true).nbytes <= shm::FindRoom(false).nbytes + (1 << 30));
}

TEST(LimitsOfTheProcessAreErrors) {
  testing::RunProcesses(1, [](int) {
    rlimit limit{1 << 20, 1 << 20};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);  // would be SIGXFSZ
    CHECK_ERROR(shm::Memory::Create(2 << 20, 1, shm::Naming::kAnonymous, 1, "a test"),
                Kind::kUnsupported, "ulimit -f");
    shm::Memory::Create(1 << 19, 1, shm::Naming::kAnonymous, 1, "a test");
  });
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  testing::RunProcesses(1, [](int) {
    rlimit limit{256 << 20, 256 << 20};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK_ERROR(shm::Memory::Create(512 << 20, 1, shm::Naming::kAnonymous, 1, "a test"),
                Kind::kUnsupported, "ulimit -v");
  });
#endif
}

TEST(AFreedSegmentGivesItsPagesBack) {
  constexpr int64_t kNbytes = 8 << 20;
  shm::Attachments attachments;
  auto create = [] {
    return std::make_unique<shm::SharedSegment>(
        shm::Memory::Create(kNbytes, 1, shm::Naming::kAnonymous, 1, "a test"));
  };
  auto first = create();
  const shm::MemoryKey key = first->key();
  std::memset(attachments.Find(1, key), 1, kNbytes);
  CHECK(BlocksOf(key) >= kNbytes);
  const int before = dup(key.fd);  // outlives the owner's
  first.reset();
  shm::MemoryKey copy = key;
  copy.fd = before;
  CHECK(BlocksOf(copy) <= 4096);
  close(before);
  // What was freed is let go of when something new is attached.
  auto second = create();
  attachments.Find(1, second->key());
  CHECK_EQ(attachments.size(), 1U);
  CHECK(attachments.Find(1, second->key()) == attachments.Find(1, second->key()));
  CHECK(SharedKilobytes() < 4 * kNbytes / 1024);
}

TEST(AKilledOwnerLeavesNothing) {
  const uint64_t nonce = Nonce();
  const auto ends = testing::RunAndCollect(1, [&](int) {
    const auto memory = shm::Memory::Create(1 << 20, nonce, shm::Naming::kAnonymous, 1, "a test");
    raise(SIGKILL);
  });
  CHECK(WIFSIGNALED(ends[0].status));
  CHECK_EQ(NamesInDevShm(nonce), 0);
}

// What a fork of Python's multiprocessing does: the child's copies must not touch what is the
// parent's.
TEST(AForkedChildDamagesNothing) {
  const uint64_t nonce = Nonce();
  auto memory = shm::Memory::Create(4096, nonce, shm::Naming::kNamed, 1, "a test");
  auto segment = std::make_unique<shm::SharedSegment>(
      shm::Memory::Create(4096, nonce, shm::Naming::kAnonymous, 1, "a test"));
  auto page = shm::Page::Create(2, nonce, shm::Naming::kAnonymous);
  static_cast<char*>(segment->data())[0] = 'k';
  testing::RunProcesses(1, [&](int) {
    memory.reset();
    segment.reset();
    page->Leave(0, shm::MemberState::kClosed, "");
    page.reset();
  });
  CHECK_EQ(NamesInDevShm(nonce), 1);
  CHECK_EQ(static_cast<char*>(segment->data())[0], 'k');
  CHECK_EQ(page->member(0).state.load(), 0U);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
