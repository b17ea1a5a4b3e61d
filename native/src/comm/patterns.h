// Who talks to whom: each collective as a pure function of rank, size and sizes in bytes. Peers are
// ranks of the communicator. Every reduction follows Note [Order of summation] (reduce/layout.h),
// operands in the order of ranks, so all of them give the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/schedule.h"

namespace gradred::comm {

using Ranges = std::vector<reduce::Range>;  // [rank], bytes

// Messages of one rank that are under way together: a bound for memory and matching queues at large
// sizes.
constexpr int kWindow = 32;

// The fold: ranks from p on, p the largest power of two that fits, give their data to the rank that
// is p lower.
int LargestPowerOfTwo(int size);  // p
int HopCount(int size);           // ceil(log2(size)): hops between a rank's value and the result

// --- patterns_reduce.cpp: in place on kData ---

// log2(size) exchanges of everything: for short data.
Schedule RecursiveDoublingAllReduce(int rank, int size, int64_t nbytes);
// Exchanges of halves, quarters, ... and back: twice the data sent, whatever the size, plus as much
// again to fold.
Schedule RecursiveHalvingAllReduce(int rank, int size, int64_t nbytes);
// Each rank collects one part from everybody, reduces it and sends the result to everybody: no
// fold, size - 1 messages.
Schedule PairwiseAllReduce(int rank, int size, int64_t nbytes);
// Parts go round the ring of ranks, summed on the way, and round again: the data twice, to one peer
// and from one peer. A part's order of summation begins at another rank than the next part's, so
// bits depend on where the parts are cut. Not for averages of halves: the ranks' values pass
// different numbers of hops.
Schedule RingAllReduce(int rank, int size, int64_t nbytes);
// The first half of PairwiseAllReduce, for any parts.
Schedule PairwiseReduceScatter(int rank, int size, const Ranges& parts);

// --- patterns_move.cpp ---

// blocks[r] of kOut come from rank r. `mine`: where the own one lies now; copied unless it is
// already in place.
Schedule PairwiseAllGather(int rank, int size, const Ranges& blocks, Slice mine);
// log2(size) exchanges of ever more blocks: for short data.
Schedule BruckAllGather(int rank, int size, const Ranges& blocks, Slice mine);
// kOut of the root to kOut of all; in chunks, so that the levels of the tree overlap.
Schedule BinomialBroadcast(int rank, int size, int root, int64_t nbytes, int64_t chunk_nbytes);
// Blocks of kIn to blocks of kOut, one after the other in the order of ranks.
Schedule PairwiseAllToAll(int rank, int size, const std::vector<int64_t>& send,
                          const std::vector<int64_t>& recv);

// --- patterns_exchange.cpp ---

Schedule DisseminationBarrier(int rank, int size);
// One message each way; -1: none.
struct Exchange {
  int send_to = -1, receive_from = -1;
};
// Recursive doubling after a fold. Where a rank beyond p gets the result back it receives without
// sending, as the last step: what it receives replaces what it has.
std::vector<Exchange> RecursiveDoublingUnion(int rank, int size);

}  // namespace gradred::comm
