// Where a distributed matrix has entries: compressed rows in stripes over the ranks, and who needs
// whose elements of a vector.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "diff/channel.h"

namespace gradred::sparse {

// Rank r owns [begin[r], begin[r + 1]); equal on all ranks.
struct Stripes {
  std::vector<int64_t> begin;  // [ranks + 1], from 0, not descending

  int64_t total() const { return begin.back(); }
  int64_t count(int rank) const { return begin[rank + 1] - begin[rank]; }
  int OwnerOf(int64_t index) const;
};

// Immutable once built. Values of a matrix are an array beside it, `nonzeros()` long on each rank.
class Pattern {
 public:
  // Elements of a vector that this rank and a peer exchange.
  struct Neighbour {
    int peer;                     // rank of the transport
    std::vector<int32_t> sent;    // own columns, as local indices
    int64_t ghost_begin, ghosts;  // received: consecutive ghost columns
  };
  // Triplets that this rank and a peer exchange when a matrix is assembled.
  struct Contribution {
    int peer;
    std::vector<int64_t> sent;   // positions in the local list
    std::vector<int64_t> slots;  // where in the values the received ones are added
  };

  int64_t rows() const { return static_cast<int64_t>(starts_.size()) - 1; }  // of this rank
  int64_t columns() const { return own_columns_; }                           // of this rank
  int64_t nonzeros() const { return static_cast<int64_t>(columns_.size()); }
  int64_t triplets() const { return triplets_; }
  int64_t first_row() const { return first_row_; }
  int64_t first_column() const { return first_column_; }
  const Stripes& row_stripes() const { return row_stripes_; }
  const Stripes& column_stripes() const { return column_stripes_; }

  // Row i has the entries starts()[i] ... starts()[i + 1], in the order of global columns, so that
  // sums along a row do not depend on the number of ranks. Local columns: the own ones from 0, then
  // the ghost columns, ascending.
  const std::vector<int64_t>& starts() const { return starts_; }
  const std::vector<int32_t>& local_columns() const { return columns_; }
  const std::vector<int64_t>& ghost_columns() const { return ghosts_; }  // global
  int64_t GlobalColumn(int32_t local) const {
    return local < own_columns_ ? first_column_ + local : ghosts_[local - own_columns_];
  }
  // Rows that need no ghost columns, and the others.
  const std::vector<int32_t>& inner_rows() const { return inner_rows_; }
  const std::vector<int32_t>& border_rows() const { return border_rows_; }
  // Position in the values of the entry (i, i) of local row i; -1: none.
  const std::vector<int64_t>& diagonal() const { return diagonal_; }

  const std::vector<Neighbour>& neighbours() const { return neighbours_; }
  const std::vector<Contribution>& contributions() const { return contributions_; }

 private:
  friend class PatternBuild;
  Stripes row_stripes_, column_stripes_;
  int64_t first_row_ = 0, first_column_ = 0, own_columns_ = 0, triplets_ = 0;
  std::vector<int64_t> starts_, ghosts_, diagonal_;
  std::vector<int32_t> columns_, inner_rows_, border_rows_;
  std::vector<Neighbour> neighbours_;
  std::vector<Contribution> contributions_;
};
using PatternPtr = std::shared_ptr<const Pattern>;

// What is wrong with the stripes of `size` ranks or with the triplets; empty: nothing.
std::string FindPatternError(const Stripes& row_stripes, const Stripes& column_stripes, int size,
                             const int64_t* rows, const int64_t* columns, int64_t count);

// Entries where any rank has a triplet (rows[k], columns[k]), k < count, global indices in any
// order; rows of other ranks are sent to their owners. Collective; the arguments of no rank have an
// error.
PatternPtr BuildPattern(diff::Channel& channel, Stripes row_stripes, Stripes column_stripes,
                        const int64_t* rows, const int64_t* columns, int64_t count);

}  // namespace gradred::sparse
