// Seam: collectives of one group of ranks. Built from a Transport and algorithms
// (AlgorithmCommunicator), or native.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport.h"
#include "reduce/layout.h"

namespace gradred::comm {

enum class Space { kHost, kShared, kPinned, kDevice };

// Memory that a communicator can reduce in. Freed by the destructor, which must not run while a
// Work uses it.
class Segment {
 public:
  virtual ~Segment() = default;
  virtual void* data() = 0;
  virtual int64_t nbytes() const = 0;
  virtual Space space() const = 0;
};
using SegmentPtr = std::unique_ptr<Segment>;
using LayoutPtr = std::shared_ptr<const reduce::Layout>;

// The tensors behind a layout: whoever reduces asks for ranges of the layout's bytes when it has
// room for them, and gives them back reduced. Used by the thread of the communicator. Ranges start
// and end at multiples of kAlign or at the layout's end. They are packed in ascending order, each
// byte once, and unpacked in ascending order, each byte once, and none before it has been packed;
// between the two, later ranges may be packed.
class Cargo {
 public:
  virtual ~Cargo() = default;
  // Writes the bytes of `range` to `at`, where its first byte lies.
  virtual void Pack(reduce::Range range, void* at) = 0;
  // The reduced bytes of `range` lie at `at`; they are the communicator's again after the call.
  virtual void Unpack(reduce::Range range, const void* at) = 0;
};
using CargoPtr = std::shared_ptr<Cargo>;

// merge(a, b) must be commutative and associative: the result must not depend on the order.
using MergeFunction = std::function<std::string(const std::string&, const std::string&)>;

// All calls are collective over the communicator's ranks, start a Work and do not wait. The ranks
// issue them in one order; several may be unfinished at once. Arguments must agree over ranks where
// not said otherwise; sizes that are not known to agree are exchanged by the caller first. Used by
// one thread, the one that owns the transport.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // "recursive halving over mpi", for reports
  virtual Transport& transport() = 0;    // what the owner sleeps on

  // A local call, not collective: memory for AllReduce, ReduceScatter and AllGather of this
  // communicator, zeroed or not. Throws kUnsupported with sizes and remedy when there is no room (a
  // full /dev/shm is an error here, never a SIGBUS later).
  virtual SegmentPtr Alloc(int64_t nbytes) = 0;
  // Alloc as a collective call, after which all ranks can reach the memory of all: when the Work
  // finishes, `*segment` is set, or null on all ranks because one had no room for its own or for a
  // mapping of another's; that rank logs why. Nothing else is called before.
  virtual WorkPtr AllocOnAll(int64_t nbytes, SegmentPtr* segment);

  // In place on [offset, offset + layout->nbytes()) of `segment`, which comes from Alloc of this
  // communicator and has the same offset on all ranks (the segments may be different objects at
  // different times, but each rank uses the segment that it allocated k-th where the others use
  // their k-th). `offset` is a multiple of kAlign. A segment is reused by the owner as soon as its
  // own Work is finished; that rule alone must be enough.
  virtual WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) = 0;
  // The same sums, of what `cargo` packs, through memory of the communicator: where it can, a
  // window of chunks that stay in cache, so that packing, summing and unpacking of different chunks
  // overlap. Without an implementation of its own (cargo.cpp): all of it in one segment.
  virtual WorkPtr AllReduceCargo(LayoutPtr layout, CargoPtr cargo);
  // Memory that the communicator keeps for the above, bytes.
  virtual int64_t window_nbytes() const { return 0; }
  // Afterwards rank r holds the reduced bytes of parts[r] (ranges relative to `offset`, multiples
  // of kAlign or the layout's end, one a rank, maybe empty); the other parts of its segment are
  // undefined.
  virtual WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                                std::vector<reduce::Range> parts) = 0;
  // Rank r brings parts[r]; afterwards all have all parts. Directly after a ReduceScatter of the
  // same parts, or alone.
  virtual WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<reduce::Range> parts) = 0;

  // On any host memory. nbytes[r]: what rank r brings; `all` receives the contributions in rank
  // order.
  virtual WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) = 0;
  virtual WorkPtr Broadcast(void* data, int64_t nbytes, int root) = 0;
  // send[r] bytes go to rank r, recv[r] come from it; blocks lie one after the other in rank order.
  virtual WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                            std::vector<int64_t> recv) = 0;
  virtual WorkPtr Barrier() = 0;
  // *blob becomes merge of all ranks' blobs, which may differ in size; equal on all ranks, in
  // log2(size) exchanges.
  virtual WorkPtr Union(std::string* blob, MergeFunction merge) = 0;

  // See Note [Averages of halves] in reduce/layout.h: reduced value of kAverage *
  // average_residual() = mean.
  virtual double average_residual() const = 0;
};

// Sizes of one process set's nodes decide how hierarchical divides the work.
struct Topology {
  int rank = 0, size = 1;
  std::vector<int> node_of;  // [size], nodes numbered in order of their lowest rank
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;  // among the ranks with my local_rank, one a node
  bool homogeneous = true;             // all nodes have the same number of ranks
  int nodes() const;

  static Topology Make(int rank, std::vector<int> node_of);
  // The same for the members of a process set (world ranks, ascending); `rank` must be one of them.
  Topology Restrict(const std::vector<int>& members) const;
  std::vector<int> RanksOfNode(int node) const;
};

}  // namespace gradred::comm
