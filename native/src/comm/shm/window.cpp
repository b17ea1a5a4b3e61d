#include <algorithm>
#include <string>
#include <utility>

#include "base/timeline.h"
#include "comm/shm/job.h"

namespace gradred::comm::shm {
namespace {

// Note [Windows]
// A cargo goes chunk by chunk through a window of slots in the rank's own memory; chunk c of the
// communicator (all cargos count on) uses slot c % window_chunks of every rank. Three gates a slot:
// *packed*: all ranks' values of the chunk are in their slots; each rank then reduces its part over
// all slots into its own slot. *reduced*: all parts are sums; each rank unpacks part p from the
// slot of rank p. *unpacked*: nobody reads the slots any more; the next chunk may be packed there.
// A window is a few chunks, so slots and the tensors' bytes are read back while they are in cache,
// and each byte crosses the caches twice: once to be summed, once as a sum. Unlike in place, where
// the parts are pushed: there the third flag costs a wait at the end of each work, here it is long
// since set when the slot's turn comes again.
//
// A rank always does the oldest thing that is possible: unpack, else reduce, else pack the next. So
// it packs ahead, up to the window's end, rather than wait; ranks in step stay two chunks deep, and
// ranks that share a core do a window's worth before they change places.
//
// A cargo whose chunks do not fit the slots makes the window anew, when all ranks have unpacked all
// chunks before: all ranks do so at the same work, and say where the new window is when they
// arrive.
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
    if (unpacked_ < reduced_ && Passed(board.reduced(Number(unpacked_)), unpacked_)) {
      Unpack();
      *budget -= RangeOf(unpacked_).nbytes();
      Pass(board.unpacked(Number(unpacked_)), unpacked_);
      finished = ++unpacked_ == count_;
    } else if (reduced_ < packed_ && met_ && Passed(board.packed(Number(reduced_)), reduced_)) {
      Reduce();
      *budget -= RangeOf(reduced_).nbytes();
      Pass(board.reduced(Number(reduced_)), reduced_);
      ++reduced_;
    } else if (packed_ < count_ && SlotIsFree(Number(packed_))) {
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
  bool SlotIsFree(uint64_t number) const {
    if (number < window_chunks()) return true;
    const uint64_t before = number - window_chunks();
    return common_.AllPassed(common_.board->unpacked(before), before / window_chunks());
  }

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
    if (common_.slot_nbytes < chunk_nbytes_ && !Grow()) return false;
    slots_[me()] = common_.window->data();
    Arrive(common_.window->key());
    ++common_.cargos_arrived;
    return arrived_ = true;
  }

  // False while a peer may still read the present window.
  bool Grow() {
    for (uint64_t chunk = first_ - std::min(first_, window_chunks()); chunk < first_; ++chunk) {
      if (!SlotIsFree(chunk + window_chunks())) return false;
    }
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
    return true;
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

  std::vector<reduce::Range> PartsOf(reduce::Range chunk) const {
    std::vector<reduce::Range> parts = reduce::Split(chunk.nbytes(), common_.size());
    for (reduce::Range& part : parts) part = {part.begin + chunk.begin, part.end + chunk.begin};
    return parts;
  }

  void Reduce() {
    const reduce::Range chunk = RangeOf(reduced_);
    const reduce::Range mine = PartsOf(chunk)[me()];
    if (mine.nbytes() == 0 || (slots_.size() == 1 && common_.shift == 0)) return;
    const timeline::ChunkSpan span(timeline::Work::kSum, mine.nbytes());
    std::vector<const void*> ins(slots_.size());  // where the layout would start
    for (size_t r = 0; r < ins.size(); ++r) ins[r] = Slot(r, reduced_) - chunk.begin;
    layout_->ReduceNode(Slot(me(), reduced_) - chunk.begin, ins.data(),
                        static_cast<int>(ins.size()), mine, common_.node_scale());
  }

  void Unpack() {
    const reduce::Range chunk = RangeOf(unpacked_);
    const std::vector<reduce::Range> parts = PartsOf(chunk);
    for (size_t r = 0; r < parts.size(); ++r) {
      if (parts[r].nbytes() == 0) continue;
      cargo_->Unpack(parts[r], Slot(r, unpacked_) + (parts[r].begin - chunk.begin));
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
