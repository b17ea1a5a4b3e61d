#include <algorithm>

#include "comm/patterns.h"

namespace gradred::comm {
namespace {

Slice Data(const reduce::Range& range) { return {Buffer::kData, range.begin, range.nbytes()}; }

// into = into + theirs, the lower rank's value first: equal bits on both sides even for NaNs and
// signed zeros.
void AddHop(Schedule* s, const Slice& into, const Slice& theirs, int rank, int peer,
            int64_t begin) {
  if (rank < peer) {
    s->Hop(into, into, theirs, begin);
  } else {
    s->Hop(into, theirs, into, begin);
  }
}

void ExchangeAndAdd(Schedule* s, int rank, int peer, const reduce::Range& give,
                    const reduce::Range& keep) {
  s->Next();
  const Slice theirs = s->Scratch(keep.nbytes());
  s->Recv(peer, theirs);
  s->Send(peer, Data(give));
  AddHop(s, Data(keep), theirs, rank, peer, keep.begin);
}

// True where this rank takes part in what follows.
bool Fold(Schedule* s, int rank, int size, const reduce::Range& all) {
  const int p = LargestPowerOfTwo(size);
  if (p == size) return true;
  s->Next();
  if (rank >= p) {
    s->Send(rank - p, Data(all));
  } else if (rank + p < size) {
    const Slice theirs = s->Scratch(all.nbytes());
    s->Recv(rank + p, theirs);
    AddHop(s, Data(all), theirs, rank, rank + p, all.begin);
  } else {
    s->HopAlone(Data(all), all.begin);
  }
  return rank < p;
}

void Unfold(Schedule* s, int rank, int size, const reduce::Range& all) {
  const int p = LargestPowerOfTwo(size);
  if (p == size) return;
  s->Next();
  if (rank >= p) {
    s->Recv(rank - p, Data(all));
  } else if (rank + p < size) {
    s->Send(rank + p, Data(all));
  }
}

// The tree of one part, on the rank that has everybody's values of it.
void ReduceTree(Schedule* s, int size, std::vector<Slice> values, const reduce::Range& part) {
  const int p = LargestPowerOfTwo(size);
  if (p < size) {
    for (int i = 0; i < p; ++i) {
      if (i + p < size) {
        s->Hop(values[i], values[i], values[i + p], part.begin);
      } else {
        s->HopAlone(values[i], part.begin);
      }
    }
  }
  for (int distance = p / 2; distance >= 1; distance /= 2) {
    for (int i = 0; i < distance; ++i) {
      const Slice out = distance == 1 ? Data(part) : values[i];
      s->Hop(out, values[i], values[i + distance], part.begin);
    }
  }
}

}  // namespace

int LargestPowerOfTwo(int size) {
  int p = 1;
  while (p <= size / 2) p *= 2;
  return p;
}

int HopCount(int size) {
  int hops = 0;
  while ((int64_t{1} << hops) < size) ++hops;
  return hops;
}

Schedule RecursiveDoublingAllReduce(int rank, int size, int64_t nbytes) {
  Schedule s;
  const reduce::Range all{0, nbytes};
  if (Fold(&s, rank, size, all)) {
    for (int distance = LargestPowerOfTwo(size) / 2; distance >= 1; distance /= 2) {
      ExchangeAndAdd(&s, rank, rank ^ distance, all, all);
    }
  }
  Unfold(&s, rank, size, all);
  return s;
}

Schedule RecursiveHalvingAllReduce(int rank, int size, int64_t nbytes) {
  Schedule s;
  const int p = LargestPowerOfTwo(size);
  const Ranges block = reduce::Split(nbytes, p);
  // The blocks that belong to the 2 * distance ranks around `r` whose numbers differ in the bits
  // below only.
  const auto blocks_of = [&](int r, int distance) -> reduce::Range {
    const int first = r & ~(distance - 1);
    return {block[first].begin, block[first + distance - 1].end};
  };
  const reduce::Range all{0, nbytes};
  if (Fold(&s, rank, size, all)) {
    for (int distance = p / 2; distance >= 1; distance /= 2) {
      const int peer = rank ^ distance;
      ExchangeAndAdd(&s, rank, peer, blocks_of(peer, distance), blocks_of(rank, distance));
    }
    for (int distance = 1; distance < p; distance *= 2) {
      const int peer = rank ^ distance;
      s.Next();
      s.Recv(peer, Data(blocks_of(peer, distance)));
      s.Send(peer, Data(blocks_of(rank, distance)));
    }
  }
  Unfold(&s, rank, size, all);
  return s;
}

Schedule PairwiseReduceScatter(int rank, int size, const Ranges& parts) {
  Schedule s;
  const reduce::Range& mine = parts[rank];
  std::vector<Slice> values(size);
  values[rank] = Data(mine);
  s.Next();
  for (int distance = 1; distance < size; ++distance) {
    if (distance % kWindow == 0) s.Next();
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    values[from] = s.Scratch(mine.nbytes());
    s.Recv(from, values[from]);
    s.Send(to, Data(parts[to]));
  }
  ReduceTree(&s, size, std::move(values), mine);
  return s;
}

Schedule PairwiseAllReduce(int rank, int size, int64_t nbytes) {
  const Ranges parts = reduce::Split(nbytes, size);
  Schedule s = PairwiseReduceScatter(rank, size, parts);
  s.Next();
  for (int distance = 1; distance < size; ++distance) {
    if (distance % kWindow == 0) s.Next();
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    s.Recv(from, Data(parts[from]));
    s.Send(to, Data(parts[rank]));
  }
  return s;
}

Schedule RingAllReduce(int rank, int size, int64_t nbytes) {
  Schedule s;
  if (size == 1) return s;
  const Ranges parts = reduce::Split(nbytes, size);
  const auto part = [&](int i) -> const reduce::Range& { return parts[(i + 2 * size) % size]; };
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  for (int step = 0; step < size - 1; ++step) {
    const reduce::Range& coming = part(rank - step - 1);
    s.Next();
    const Slice theirs = s.Scratch(coming.nbytes());
    s.Recv(previous, theirs);
    s.Send(next, Data(part(rank - step)));
    s.Hop(Data(coming), theirs, Data(coming), coming.begin);
  }
  for (int step = 0; step < size - 1; ++step) {
    s.Next();
    s.Recv(previous, Data(part(rank - step)));
    s.Send(next, Data(part(rank + 1 - step)));
  }
  return s;
}

}  // namespace gradred::comm
