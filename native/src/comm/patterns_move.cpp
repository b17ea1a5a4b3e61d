#include <algorithm>

#include "comm/patterns.h"

namespace gradred::comm {
namespace {

Slice Out(const reduce::Range& range) { return {Buffer::kOut, range.begin, range.nbytes()}; }

Ranges OneAfterTheOther(const std::vector<int64_t>& nbytes) {
  Ranges blocks;
  int64_t at = 0;
  for (const int64_t n : nbytes) {
    blocks.push_back({at, at + n});
    at += n;
  }
  return blocks;
}

void CopyUnlessThere(Schedule* s, const Slice& out, const Slice& from) {
  if (from.buffer != out.buffer || from.offset != out.offset) s->Copy(out, from);
}

}  // namespace

Schedule PairwiseAllGather(int rank, int size, const Ranges& blocks, Slice mine) {
  Schedule s;
  s.Next();
  CopyUnlessThere(&s, Out(blocks[rank]), mine);
  for (int distance = 1; distance < size; ++distance) {
    if (distance % kWindow == 0) s.Next();
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    s.Recv(from, Out(blocks[from]));
    s.Send(to, mine);
  }
  return s;
}

Schedule BruckAllGather(int rank, int size, const Ranges& blocks, Slice mine) {
  Schedule s;
  std::vector<int64_t> nbytes(size);  // of the blocks from the own one on, around the circle
  for (int i = 0; i < size; ++i) nbytes[i] = blocks[(rank + i) % size].nbytes();
  const Ranges at = OneAfterTheOther(nbytes);
  const Slice circle = s.Scratch(at.back().end);
  const auto part = [&](int first, int last) -> Slice {  // blocks first ... last - 1
    const int64_t begin = at[first].begin;
    return {Buffer::kScratch, circle.offset + begin, at[last - 1].end - begin};
  };
  s.Next();
  s.Copy(part(0, 1), mine);
  for (int have = 1; have < size; have *= 2) {
    const int more = std::min(have, size - have);
    s.Next();
    s.Recv((rank + have) % size, part(have, have + more));
    s.Send((rank + size - have) % size, part(0, more));
  }
  s.Next();
  for (int i = 0; i < size; ++i) {
    const Slice out = Out(blocks[(rank + i) % size]);
    if (i > 0 || mine.buffer != out.buffer) s.Copy(out, part(i, i + 1));
  }
  return s;
}

Schedule BinomialBroadcast(int rank, int size, int root, int64_t nbytes, int64_t chunk_nbytes) {
  Schedule s;
  const int place = (rank + size - root) % size;  // in the tree: 0 is the root
  // The parent of a place lacks its lowest bit; its children set one below that.
  int lowest = 1;
  while (lowest < size && (place & lowest) == 0) lowest *= 2;
  std::vector<int> children;  // largest subtree first
  for (int bit = lowest / 2; bit >= 1; bit /= 2) {
    if (place + bit < size) children.push_back((place + bit + root) % size);
  }
  const int parent = (place - lowest + root + size) % size;
  const auto chunk = [&](int64_t begin) -> Slice {
    return {Buffer::kOut, begin, std::min(chunk_nbytes, nbytes - begin)};
  };
  for (int64_t begin = 0; begin < nbytes; begin += chunk_nbytes) {
    if (place != 0) {
      s.Next();
      s.Recv(parent, chunk(begin));
    }
    s.Next();
    for (const int child : children) s.Send(child, chunk(begin));
  }
  return s;
}

Schedule PairwiseAllToAll(int rank, int size, const std::vector<int64_t>& send,
                          const std::vector<int64_t>& recv) {
  Schedule s;
  const Ranges in = OneAfterTheOther(send), out = OneAfterTheOther(recv);
  const auto block = [&](int r) -> Slice { return {Buffer::kIn, in[r].begin, in[r].nbytes()}; };
  s.Next();
  s.Copy(Out(out[rank]), block(rank));
  for (int distance = 1; distance < size; ++distance) {
    if (distance % kWindow == 0) s.Next();
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    s.Recv(from, Out(out[from]));
    s.Send(to, block(to));
  }
  return s;
}

}  // namespace gradred::comm
