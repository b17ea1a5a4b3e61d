#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/timeline.h"
#include "comm/shm/job.h"

namespace gradred::comm::shm {
namespace {

// Reduced and pushed while in the nearest cache. A multiple of kAlign.
constexpr int64_t kBlock = 16 << 10;

// Note [Windows]
// A cargo goes chunk by chunk through a window of slots in the rank's own memory; chunk c of the
// communicator (all cargos count on) uses slot c % window_chunks of every rank. Two gates a slot:
// *packed*: all ranks' values of the chunk are in their slots; rank r then reduces part r over all
// slots and writes the sums into all of them. *reduced*: all parts are sums in all slots; each rank
// unpacks its own. From then on nobody touches a rank's slot until it has packed the next chunk
// there, so it needs no third gate. A window is a few chunks, so slots and the tensors' bytes are
// read back while they are in cache.
//
// The sums are pushed, not pulled, because of what a write costs: a line that is dirty in one cache
// and was read by another one is written fast by the last reader, and slowly by the first: 16 and
// 2.3 GB/s where the two cores share no cache (an EPYC 9004). When sums are pushed, only two ranks
// touch a line, and each writes what it was the last to read.
//
// A rank always does the oldest thing that is possible: unpack, else reduce, else pack the next. So
// it packs ahead, up to the window's end, rather than wait; ranks in step stay two chunks deep, and
// ranks that share a core do a window's worth before they change places.
//
// A cargo whose chunks do not fit the slots makes the window anew: all ranks do so at the same
// work, and say where the new window is when they arrive.
class CargoJob final : public Job {
 public:
  CargoJob(Common& common, LayoutPtr layout, CargoPtr cargo)
      : Job(common, What::kCargo, 0, layout->nbytes()),
        layout_(std::move(layout)),
        cargo_(std::move(cargo)),
        turn_(common.cargos++),
        first_(common.chunks),
        slots_(static_cast<size_t>(common.size())) {
    const int64_t most = reduce::AlignUp(common.options.chunk_nbytes);
    count_ = (nbytes_ + most - 1) / most;
    chunk_nbytes_ = reduce::AlignUp((nbytes_ + count_ - 1) / count_);
    count_ = (nbytes_ + chunk_nbytes_ - 1) / chunk_nbytes_;  // rounding up may save one
    common.chunks += static_cast<uint64_t>(count_);
  }

 private:
  bool Step(int64_t* budget) override {
    Board& board = *common_.board;
    if (!arrived_) return TryToArrive();
    if (unpacked_ < reduced_ && common_.chunks_unpacked == Number(unpacked_) &&
        Passed(board.reduced(Number(unpacked_)), unpacked_)) {
      const reduce::Range range = RangeOf(unpacked_);
      cargo_->Unpack(range, Slot(me(), unpacked_));
      *budget -= range.nbytes();
      ++common_.chunks_unpacked;
      finished = ++unpacked_ == count_;
    } else if (reduced_ < packed_ && met_ && Passed(board.packed(Number(reduced_)), reduced_)) {
      Reduce();
      *budget -= RangeOf(reduced_).nbytes();
      Pass(board.reduced(Number(reduced_)), reduced_);
      ++reduced_;
    } else if (packed_ < count_ && Number(packed_) < common_.chunks_unpacked + window_chunks()) {
      const reduce::Range range = RangeOf(packed_);
      cargo_->Pack(range, Slot(me(), packed_));
      *budget -= range.nbytes();
      Pass(board.packed(Number(packed_)), packed_);
      ++packed_;
    } else {
      return !met_ && Meet();
    }
    return true;
  }

  size_t me() const { return static_cast<size_t>(common_.rank); }
  uint64_t window_chunks() const { return static_cast<uint64_t>(common_.options.window_chunks); }

  // Chunks are counted from 0 in this cargo, and from 0 in the communicator: Number.
  uint64_t Number(int64_t chunk) const { return first_ + static_cast<uint64_t>(chunk); }
  bool Passed(const Gate& gate, int64_t chunk) const {
    return common_.AllPassed(gate, Number(chunk) / window_chunks());
  }
  void Pass(Gate& gate, int64_t chunk) { common_.Pass(gate, Number(chunk) / window_chunks()); }

  reduce::Range RangeOf(int64_t chunk) const {
    const int64_t begin = chunk * chunk_nbytes_;
    return {begin, std::min(begin + chunk_nbytes_, nbytes_)};
  }
  char* Slot(size_t rank, int64_t chunk) const {
    const auto slot = static_cast<int64_t>(Number(chunk) % window_chunks());
    return slots_[rank] + slot * common_.slot_nbytes;
  }

  bool TryToArrive() {
    if (common_.cargos_arrived != turn_ || !PlaceIsFree()) return false;
    if (common_.slot_nbytes < chunk_nbytes_) {
      if (common_.chunks_unpacked != first_) return false;
      Grow();
    }
    slots_[me()] = common_.window->data();
    Arrive(common_.window->key());
    ++common_.cargos_arrived;
    return arrived_ = true;
  }

  // All chunks before have been unpacked here, so nobody touches the present window.
  void Grow() {
    if (common_.window != nullptr) common_.window->Discard();
    common_.window.reset();  // the old memory first: the peak is the new size
    int64_t slot = 16 << 10;
    while (slot < chunk_nbytes_) slot *= 2;
    slot = std::max(std::min(slot, reduce::AlignUp(common_.options.chunk_nbytes)), chunk_nbytes_);
    common_.slot_nbytes = 0;
    common_.window =
        Memory::Create(slot * common_.options.window_chunks, common_.options.nonce,
                       common_.options.naming, common_.size() - 1,
                       "the reduction window of rank " + std::to_string(common_.transport.rank()));
    common_.slot_nbytes = slot;
  }

  // True once all have arrived and their windows are found.
  bool Meet() {
    if (!AllArrived()) return false;
    for (int peer = 0; peer < common_.size(); ++peer) {
      if (peer == common_.rank) continue;
      slots_[static_cast<size_t>(peer)] = MemoryOf(peer, common_.window->nbytes());
    }
    return met_ = true;
  }

  void Reduce() {
    const reduce::Range chunk = RangeOf(reduced_);
    const reduce::Range mine = reduce::Split(chunk.nbytes(), common_.size())[me()];
    const size_t n = slots_.size();
    if (mine.nbytes() == 0 || (n == 1 && common_.shift == 0)) return;
    const timeline::ChunkSpan span(timeline::Work::kSum, mine.nbytes());
    std::vector<char*> slots(n);  // where the layout would start
    for (size_t r = 0; r < n; ++r) slots[r] = Slot(r, reduced_) - chunk.begin;
    for (int64_t at = chunk.begin + mine.begin, end = chunk.begin + mine.end; at < end;) {
      const reduce::Range block{at, std::min(at + kBlock, end)};
      layout_->ReduceNode(slots[me()], reinterpret_cast<const void* const*>(slots.data()),
                          static_cast<int>(n), block, common_.node_scale());
      for (size_t i = 1; i < n; ++i) {
        std::memcpy(slots[(me() + i) % n] + at, slots[me()] + at,
                    static_cast<size_t>(block.nbytes()));
      }
      at = block.end;
    }
  }

  const LayoutPtr layout_;
  const CargoPtr cargo_;
  const uint64_t turn_;   // among the cargos
  const uint64_t first_;  // number of the first chunk
  int64_t count_ = 0, chunk_nbytes_ = 0;
  int64_t packed_ = 0, reduced_ = 0, unpacked_ = 0;  // chunks
  bool arrived_ = false, met_ = false;
  std::vector<char*> slots_;  // first slot of each rank
};

}  // namespace

std::unique_ptr<Job> MakeCargoJob(Common& common, LayoutPtr layout, CargoPtr cargo) {
  return std::make_unique<CargoJob>(common, std::move(layout), std::move(cargo));
}

}  // namespace gradred::comm::shm
