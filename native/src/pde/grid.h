// A rank's block of a two-dimensional grid of nodes, and memory for fields on it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace gradred::pde {

// Axis 0 runs over rows, axis 1 along a row; nodes outside the domain hold zero.
struct Block {
  std::array<int64_t, 2> global{};  // nodes of the whole grid
  std::array<int64_t, 2> begin{};   // the block's first node
  std::array<int64_t, 2> count{};   // its nodes
  // Ranks of the transport with the blocks before and behind along axis 0, then axis 1; -1: the
  // domain ends there.
  std::array<int, 4> neighbours{-1, -1, -1, -1};

  bool Contains(int64_t i, int64_t j) const {
    return i >= begin[0] && i < begin[0] + count[0] && j >= begin[1] && j < begin[1] + count[1];
  }
};

// How `n` nodes are shared by `parts`: the first n % parts get one more.
inline int64_t PartBegin(int64_t n, int parts, int part) {
  return part * (n / parts) + std::min<int64_t>(part, n % parts);
}

// Where a field's values lie: one ghost layer around the block, own rows aligned to 64 bytes.
struct Extent {
  Extent(const std::array<int64_t, 2>& count, int64_t value_nbytes)
      : rows(count[0]),
        columns(count[1]),
        lead(64 / value_nbytes),
        stride((lead + columns + 1 + lead - 1) / lead * lead) {}
  int64_t At(int64_t row, int64_t column) const { return (row + 1) * stride + lead + column; }
  int64_t values() const { return (rows + 2) * stride + lead; }

  int64_t rows, columns;  // own
  int64_t lead;           // values before the first own one of a row; the last is its ghost
  int64_t stride;
};

// Zero at first. Pages that nothing is written to take no memory.
template <class T>
class Field {
 public:
  explicit Field(int64_t values) : values_(values) {
    memory_.reset(std::calloc(values * sizeof(T) + 64, 1));
    if (memory_ == nullptr) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<T*>((address + 63) / 64 * 64);
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t values() const { return values_; }
  void Clear() { std::fill_n(data_, values_, T{0}); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  T* data_;
  int64_t values_;
};

}  // namespace gradred::pde
