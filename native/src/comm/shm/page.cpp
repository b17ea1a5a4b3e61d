#include "comm/shm/page.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "base/status.h"

namespace gradred::comm::shm {
namespace {

constexpr int64_t kLine = 64;

// 64 KB hold the messages of a round many times over and let a long message stream; with many ranks
// the rings of a transport stay within 32 MB, as long as a ring holds a few short messages.
int64_t RingNbytesFor(int members) {
  constexpr int64_t kMost = 64 << 10, kLeast = 4 << 10, kAll = 32 << 20;
  int64_t nbytes = kMost;
  while (nbytes > kLeast && nbytes * members * members > kAll) nbytes /= 2;
  return nbytes;
}

}  // namespace

int64_t Page::NbytesFor(int members, int64_t ring_nbytes) {
  const int64_t rings = int64_t{kTransports} * members * members;
  return kLine + members * static_cast<int64_t>(sizeof(Member)) +
         rings * (static_cast<int64_t>(sizeof(RingHeader)) + ring_nbytes);
}

std::shared_ptr<Page> Page::Create(int members, uint64_t nonce, Naming naming,
                                   const PageOptions& options) {
  const int64_t ring_nbytes =
      options.ring_nbytes > 0 ? options.ring_nbytes : RingNbytesFor(members);
  std::shared_ptr<Page> page(new Page);
  page->memory_ =
      Memory::Create(NbytesFor(members, ring_nbytes), nonce, naming, members - 1,
                     "messages between " + std::to_string(members) + " ranks of one machine");
  page->data_ = page->memory_->data();
  page->pid_ = getpid();
  new (page->data_) Header{nonce, members, 0, ring_nbytes};
  return page;
}

std::shared_ptr<Page> Page::Attach(const MemoryKey& key) {
  std::shared_ptr<Page> page(new Page);
  page->memory_ = Memory::Attach(key);
  page->data_ = page->memory_->data();
  page->pid_ = getpid();
  if (page->memory_->nbytes() != NbytesFor(page->members(), page->ring_nbytes())) {
    throw Error(Kind::kTransportError, "the control page of this machine's ranks has " +
                                           std::to_string(key.nbytes) +
                                           " bytes, and its header says otherwise");
  }
  return page;
}

std::shared_ptr<Page> Page::Private(uint64_t nonce) {
  constexpr int64_t kRing = 64;  // messages to oneself use no ring
  const int64_t nbytes = NbytesFor(1, kRing);
  std::shared_ptr<Page> page(new Page);
  page->data_ = static_cast<char*>(std::aligned_alloc(kLine, static_cast<size_t>(nbytes)));
  if (page->data_ == nullptr) throw std::bad_alloc();
  std::memset(page->data_, 0, static_cast<size_t>(nbytes));
  page->pid_ = getpid();
  new (page->data_) Header{nonce, 1, 0, kRing};
  return page;
}

Page::~Page() {
  if (memory_ == nullptr) std::free(data_);
}

MemoryKey Page::key() const { return memory_ == nullptr ? MemoryKey{} : memory_->key(); }

Naming Page::naming() const {
  return memory_ == nullptr || memory_->key().fd >= 0 ? Naming::kAnonymous : Naming::kNamed;
}

Member& Page::member(int index) { return reinterpret_cast<Member*>(data_ + kLine)[index]; }

RingHeader* Page::ring(int transport, int from, int to) {
  const int64_t n = members();
  const int64_t number = (transport * n + from) * n + to;
  const int64_t first = kLine + n * static_cast<int64_t>(sizeof(Member));
  const int64_t stride = static_cast<int64_t>(sizeof(RingHeader)) + ring_nbytes();
  return reinterpret_cast<RingHeader*>(data_ + first + number * stride);
}

void Page::Leave(int index, MemberState state, const std::string& cause) {
  if (getpid() != pid_) return;
  Member& me = member(index);
  const size_t n = std::min(cause.size(), sizeof me.cause - 1);
  std::memcpy(me.cause, cause.data(), n);
  me.cause[n] = 0;
  me.state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

}  // namespace gradred::comm::shm
