#include "sparse/pattern.h"

#include <algorithm>
#include <numeric>

#include "base/status.h"

namespace gradred::sparse {
namespace {

struct Index {
  int64_t row, column;
  bool operator<(const Index& o) const { return row != o.row ? row < o.row : column < o.column; }
  bool operator==(const Index& o) const { return row == o.row && column == o.column; }
};

std::string StripesError(const Stripes& stripes, int size, const std::string& what) {
  const auto& begin = stripes.begin;
  if (static_cast<int>(begin.size()) != size + 1)
    return what + ": expected " + std::to_string(size + 1) + " limits, got " +
           std::to_string(begin.size());
  if (begin[0] != 0 || !std::is_sorted(begin.begin(), begin.end()))
    return what + ": expected limits from 0 on that do not descend";
  for (int r = 0; r < size; ++r) {
    if (stripes.count(r) > INT32_MAX)
      return what + ": expected at most 2^31 - 1 a rank, got " + std::to_string(stripes.count(r));
  }
  return "";
}

// Elements for every rank from every rank, in the order of ranks. The result lies in scratch memory
// of the channel.
template <class T>
struct Received {
  std::vector<int64_t> counts;  // [rank]
  T* data = nullptr;
  int64_t count = 0;
};

template <class T>
Received<T> Exchange(diff::Channel& channel, const std::vector<std::vector<T>>& sent) {
  const int size = channel.size();
  auto* counts = static_cast<int64_t*>(channel.Scratch(2 * size * 8));
  std::vector<int64_t> nbytes_out(size), nbytes_in(size);
  int64_t total = 0;
  for (int r = 0; r < size; ++r) {
    counts[r] = static_cast<int64_t>(sent[r].size());
    nbytes_out[r] = counts[r] * static_cast<int64_t>(sizeof(T));
    total += nbytes_out[r];
  }
  channel.AllToAll(counts, std::vector<int64_t>(size, 8), counts + size,
                   std::vector<int64_t>(size, 8));
  Received<T> received;
  received.counts.assign(counts + size, counts + 2 * size);
  for (int r = 0; r < size; ++r) {
    nbytes_in[r] = received.counts[r] * static_cast<int64_t>(sizeof(T));
    received.count += received.counts[r];
  }
  auto* out = static_cast<T*>(channel.Scratch(total));
  T* at = out;
  for (const std::vector<T>& part : sent) at = std::copy(part.begin(), part.end(), at);
  received.data =
      static_cast<T*>(channel.Scratch(received.count * static_cast<int64_t>(sizeof(T))));
  channel.AllToAll(out, nbytes_out, received.data, nbytes_in);
  return received;
}

}  // namespace

int Stripes::OwnerOf(int64_t index) const {
  return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), index) - begin.begin()) - 1;
}

std::string FindPatternError(const Stripes& row_stripes, const Stripes& column_stripes, int size,
                             const int64_t* rows, const int64_t* columns, int64_t count) {
  std::string error = StripesError(row_stripes, size, "row stripes");
  if (error.empty()) error = StripesError(column_stripes, size, "column stripes");
  for (int64_t k = 0; k < count && error.empty(); ++k) {
    if (rows[k] >= 0 && rows[k] < row_stripes.total() && columns[k] >= 0 &&
        columns[k] < column_stripes.total())
      continue;
    error = "triplet " + std::to_string(k) + ": expected a row below " +
            std::to_string(row_stripes.total()) + " and a column below " +
            std::to_string(column_stripes.total()) + ", got (" + std::to_string(rows[k]) + ", " +
            std::to_string(columns[k]) + ")";
  }
  return error;
}

class PatternBuild {
 public:
  PatternBuild(diff::Channel& channel, Stripes row_stripes, Stripes column_stripes)
      : channel_(channel), rank_(channel.rank()), size_(channel.size()) {
    p_.first_row_ = row_stripes.begin[rank_];
    p_.first_column_ = column_stripes.begin[rank_];
    p_.own_columns_ = column_stripes.count(rank_);
    p_.row_stripes_ = std::move(row_stripes);
    p_.column_stripes_ = std::move(column_stripes);
  }

  PatternPtr Build(const int64_t* rows, const int64_t* columns, int64_t count) {
    Compress(SendTriplets(rows, columns, count));
    FindNeighbours();
    return std::make_shared<const Pattern>(std::move(p_));
  }

 private:
  bool IsOwn(int64_t column) const {
    return column >= p_.first_column_ && column < p_.first_column_ + p_.own_columns_;
  }

  // Returns the entries of the own rows, each once, in the order of rows and columns.
  std::vector<Index> SendTriplets(const int64_t* rows, const int64_t* columns, int64_t count) {
    p_.triplets_ = count;
    std::vector<std::vector<int64_t>> positions(size_);
    std::vector<std::vector<Index>> sent(size_);
    for (int64_t k = 0; k < count; ++k) {
      const int owner = p_.row_stripes_.OwnerOf(rows[k]);
      positions[owner].push_back(k);
      sent[owner].push_back({rows[k], columns[k]});
    }
    const Received<Index> received = Exchange(channel_, sent);
    std::vector<Index> entries(received.data, received.data + received.count);
    std::sort(entries.begin(), entries.end());
    entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
    const Index* at = received.data;
    for (int r = 0; r < size_; ++r) {
      if (received.counts[r] == 0 && positions[r].empty()) continue;
      Pattern::Contribution contribution{r, std::move(positions[r]), {}};
      for (int64_t k = 0; k < received.counts[r]; ++k) {
        contribution.slots.push_back(std::lower_bound(entries.begin(), entries.end(), *at++) -
                                     entries.begin());
      }
      p_.contributions_.push_back(std::move(contribution));
    }
    return entries;
  }

  void Compress(const std::vector<Index>& entries) {
    std::vector<int64_t>& ghosts = p_.ghosts_;
    for (const Index& entry : entries)
      if (!IsOwn(entry.column)) ghosts.push_back(entry.column);
    std::sort(ghosts.begin(), ghosts.end());
    ghosts.erase(std::unique(ghosts.begin(), ghosts.end()), ghosts.end());
    if (p_.own_columns_ + static_cast<int64_t>(ghosts.size()) > INT32_MAX)
      throw Error(Kind::kUnsupported, "sparse matrix: rank " + std::to_string(rank_) +
                                          ": its rows reach more than 2^31 - 1 columns");

    const int64_t rows = p_.row_stripes_.count(rank_);
    p_.starts_.assign(rows + 1, 0);
    p_.diagonal_.assign(rows, -1);
    p_.columns_.reserve(entries.size());
    for (const Index& entry : entries) {
      const int64_t row = entry.row - p_.first_row_;
      if (entry.row == entry.column) p_.diagonal_[row] = p_.nonzeros();
      const int64_t local =
          IsOwn(entry.column)
              ? entry.column - p_.first_column_
              : p_.own_columns_ +
                    (std::lower_bound(ghosts.begin(), ghosts.end(), entry.column) - ghosts.begin());
      p_.columns_.push_back(static_cast<int32_t>(local));
      ++p_.starts_[row + 1];
    }
    std::partial_sum(p_.starts_.begin(), p_.starts_.end(), p_.starts_.begin());
    for (int64_t i = 0; i < rows; ++i) {
      const auto begin = p_.columns_.begin() + p_.starts_[i];
      const auto end = p_.columns_.begin() + p_.starts_[i + 1];
      const bool inner = std::all_of(begin, end, [&](int32_t c) { return c < p_.own_columns_; });
      (inner ? p_.inner_rows_ : p_.border_rows_).push_back(static_cast<int32_t>(i));
    }
  }

  // Tells the owners which of their elements are needed here.
  void FindNeighbours() {
    std::vector<std::vector<int64_t>> needed(size_);
    for (const int64_t ghost : p_.ghosts_)
      needed[p_.column_stripes_.OwnerOf(ghost)].push_back(ghost);
    const Received<int64_t> wanted = Exchange(channel_, needed);
    const int64_t* column = wanted.data;
    int64_t ghost = 0;
    for (int r = 0; r < size_; ++r) {
      const auto ghosts = static_cast<int64_t>(needed[r].size());
      if (ghosts == 0 && wanted.counts[r] == 0) continue;
      Pattern::Neighbour neighbour{r, {}, ghost, ghosts};
      ghost += ghosts;
      for (int64_t k = 0; k < wanted.counts[r]; ++k)
        neighbour.sent.push_back(static_cast<int32_t>(*column++ - p_.first_column_));
      p_.neighbours_.push_back(std::move(neighbour));
    }
  }

  diff::Channel& channel_;
  const int rank_, size_;
  Pattern p_;
};

PatternPtr BuildPattern(diff::Channel& channel, Stripes row_stripes, Stripes column_stripes,
                        const int64_t* rows, const int64_t* columns, int64_t count) {
  return PatternBuild(channel, std::move(row_stripes), std::move(column_stripes))
      .Build(rows, columns, count);
}

}  // namespace gradred::sparse
