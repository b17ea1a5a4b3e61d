#include "comm/patterns.h"

namespace gradred::comm {

// Messages of one byte, whose value nobody reads.
Schedule DisseminationBarrier(int rank, int size) {
  Schedule s;
  const Slice sent = s.Scratch(1);
  for (int distance = 1; distance < size; distance *= 2) {
    s.Next();
    s.Recv((rank + size - distance) % size, s.Scratch(1));
    s.Send((rank + distance) % size, sent);
  }
  return s;
}

std::vector<Exchange> RecursiveDoublingUnion(int rank, int size) {
  const int p = LargestPowerOfTwo(size);
  if (rank >= p) return {{rank - p, -1}, {-1, rank - p}};
  std::vector<Exchange> steps;
  const bool folded = rank + p < size;
  if (folded) steps.push_back({-1, rank + p});
  for (int distance = p / 2; distance >= 1; distance /= 2) {
    steps.push_back({rank ^ distance, rank ^ distance});
  }
  if (folded) steps.push_back({rank + p, -1});
  return steps;
}

}  // namespace gradred::comm
