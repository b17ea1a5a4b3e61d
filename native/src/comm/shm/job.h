// How works of a communicator in shared memory come forward together.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/shm/board.h"
#include "comm/shm/communicator.h"
#include "comm/shm/segment.h"

namespace gradred::comm::shm {

// What the jobs of one communicator share.
struct Common {
  Common(Transport& transport, std::vector<int> members, Tag tag, const ShmOptions& options);

  int size() const { return static_cast<int>(members.size()); }
  BoardShape shape() const;
  float node_scale() const;
  std::string Where() const;  // "rank 3 in shared memory", for errors

  // Passes a gate. The last of a round wakes the peers: a rank that sleeps is woken once, when
  // there is something for it.
  void Pass(Gate& gate, uint64_t round);
  bool AllPassed(const Gate& gate, uint64_t round) const {
    return gate.count.load(std::memory_order_acquire) >= (round + 1) * members.size();
  }

  Transport& transport;
  const std::vector<int> members;
  const ShmOptions options;
  int rank = 0;
  int shift = 0;  // log2 of what averages of halves are divided by here
  BoardOpening opening;
  std::unique_ptr<Board> board;  // null until the first job
  Attachments attachments;
  std::vector<Doorbell*> bells;  // of the peers
  uint64_t oldest = 0;           // number of the first job that has not finished

  uint64_t in_place_started = 0;                   // jobs
  uint64_t small_started = 0, small_finished = 0;  // jobs
  struct alignas(reduce::kAlign) Line {
    char bytes[reduce::kAlign];
  };
  std::vector<Line> scratch;  // of a small cargo

  uint64_t cargos = 0, cargos_arrived = 0;   // jobs
  uint64_t chunks = 0, chunks_unpacked = 0;  // of all cargos; the latter here
  std::unique_ptr<Memory> window;            // of chunk slots; null until the first cargo
  int64_t slot_nbytes = 0;
};

class Job {
 public:
  Job(Common& common, What what, int64_t offset, int64_t nbytes);
  virtual ~Job() = default;

  // Does one bounded thing, if there is one to do, and takes the bytes it has moved off *budget;
  // false: it waits for others. Throws Error.
  virtual bool Step(int64_t* budget) = 0;

  uint64_t number = 0;  // among the jobs, alike on all ranks
  bool finished = false;

 protected:
  uint64_t Round() const { return number / kWorksOnBoard; }
  // The job that had this one's place on the board has finished on all ranks.
  bool PlaceIsFree() const { return number < common_.oldest + kWorksUnderWay; }
  void Arrive(const MemoryKey& key);
  // All have arrived, and at the same work: else throws kInternal.
  bool AllArrived();
  // Where `peer`'s memory starts; it has at least `nbytes`.
  char* MemoryOf(int peer, int64_t nbytes);

  Common& common_;
  const What what_;
  const int64_t offset_, nbytes_;

 private:
  Arrival Theirs(int peer) const { return common_.board->arrival(number, peer); }
};

// In place on the ranks' segments. See Note [Reductions in shared memory].
std::unique_ptr<Job> MakeInPlaceJob(Common& common, SharedSegment& segment, int64_t offset,
                                    What what, LayoutPtr layout, std::vector<reduce::Range> parts,
                                    int64_t nbytes);
// The same for few bytes; see Note [Small reductions].
std::unique_ptr<Job> MakeSmallJob(Common& common, SharedSegment& segment, int64_t offset, What what,
                                  LayoutPtr layout, std::vector<reduce::Range> parts,
                                  int64_t nbytes);
std::unique_ptr<Job> MakeSmallCargoJob(Common& common, LayoutPtr layout, CargoPtr cargo);
// See Note [Windows].
std::unique_ptr<Job> MakeCargoJob(Common& common, LayoutPtr layout, CargoPtr cargo);

// The jobs in the order of their calls. Whichever Work is polled, all jobs move: the one polled may
// be waiting for another's turn.
class Queue {
 public:
  Queue(Transport& transport, std::vector<int> members, Tag tag, const ShmOptions& options)
      : common(transport, std::move(members), tag, options) {}

  void Add(std::shared_ptr<Job> job);
  void Advance();
  // An unfinished job whose memory its owner takes away: nothing can follow it.
  void Abandon(const Job* job);

  Common common;

 private:
  bool BoardIsOpen();

  std::deque<std::shared_ptr<Job>> jobs_;
  uint64_t next_ = 0;
  Status failure_;
};

WorkPtr MakeWork(std::shared_ptr<Queue> queue, std::unique_ptr<Job> job);

}  // namespace gradred::comm::shm
