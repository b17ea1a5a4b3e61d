// Moves the blocks of a global array from one partition of its index space to another.
#include <algorithm>
#include <cstring>

#include "diff/operation.h"

namespace gradred::diff {
namespace {

// Indices [begin, end) in each dimension.
struct Block {
  Dims begin, end;
  bool empty() const {
    for (size_t d = 0; d < begin.size(); ++d)
      if (begin[d] >= end[d]) return true;
    return false;
  }
  Dims shape() const {
    Dims shape;
    for (size_t d = 0; d < begin.size(); ++d) shape.push_back(end[d] - begin[d]);
    return shape;
  }
  int64_t count() const { return empty() ? 0 : CountOf(shape()); }
};

Block Intersect(const Block& a, const Block& b) {
  Block both = a;
  for (size_t d = 0; d < a.begin.size(); ++d) {
    both.begin[d] = std::max(a.begin[d], b.begin[d]);
    both.end[d] = std::min(a.end[d], b.end[d]);
  }
  return both;
}

// Calls `row(offset, count)` for each run of `part`, in elements of the array that holds `whole`.
template <class Function>
void ForEachRow(const Block& whole, const Block& part, const Function& row) {
  if (part.empty()) return;
  const size_t dims = whole.begin.size();
  const Dims extent = whole.shape();
  Dims at = part.begin;
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < dims; ++d) offset = offset * extent[d] + at[d] - whole.begin[d];
    row(offset, part.end[dims - 1] - part.begin[dims - 1]);
    size_t d = dims - 1;
    while (d > 0 && ++at[d - 1] == part.end[d - 1]) {
      at[d - 1] = part.begin[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

// Params: dimensions; then of each rank its box before and its box after, as begin and end of each
// dimension. Dimensions of the tensors beyond these are moved whole.
class Repartition final : public Operation {
 public:
  explicit Repartition(const Params& params) {
    const auto dims = static_cast<size_t>(params.at(0));
    for (size_t i = 1; i + 4 * dims <= params.size(); i += 4 * dims) {
      for (std::vector<Block>* boxes : {&before_, &after_}) {
        const size_t at = i + (boxes == &before_ ? 0 : 2 * dims);
        const auto from = params.begin() + static_cast<int64_t>(at);
        const auto n = static_cast<int64_t>(dims);
        boxes->push_back({Dims(from, from + n), Dims(from + n, from + 2 * n)});
      }
    }
    text_ = ToText(params);
  }

  Terms TermsOf(const Inputs& inputs, const Channel& channel) const override {
    const Input& x = inputs.at(0);
    if (static_cast<int>(before_.size()) != channel.size())
      throw Error(Kind::kInvalidArgument, "repartition: expected a box for each of the " +
                                              std::to_string(channel.size()) + " ranks, got " +
                                              std::to_string(before_.size()));
    const Dims expected = before_[channel.rank()].shape();
    const size_t dims = expected.size();
    const Dims got(x.shape.begin(), x.shape.begin() + std::min(dims, x.shape.size()));
    if (got != expected)
      throw Error(Kind::kInvalidArgument, "repartition: expected a block of shape " +
                                              ToText(expected) + ", got " + ToText(x.shape));
    return {std::string("repartition of ") + DTypeName(x.dtype) + " elements " + ToText(Rest(x)) +
                " by " + text_,
            {}};
  }

  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    const auto me = static_cast<size_t>(channel.rank());
    const size_t size = before_.size();
    const Dims rest = Rest(x);
    const int64_t unit = CountOf(rest) * DTypeSize(x.dtype);
    std::vector<int64_t> send, recv;
    int64_t send_nbytes = 0, recv_nbytes = 0;
    for (size_t r = 0; r < size; ++r) {
      send.push_back(Intersect(before_[me], after_[r]).count() * unit);
      recv.push_back(Intersect(before_[r], after_[me]).count() * unit);
      send_nbytes += send.back();
      recv_nbytes += recv.back();
    }
    Dims shape = after_[me].shape();
    shape.insert(shape.end(), rest.begin(), rest.end());
    char* out = static_cast<char*>(call.Output(0, shape));
    char* packed = static_cast<char*>(channel.Scratch(send_nbytes));
    char* received = static_cast<char*>(channel.Scratch(recv_nbytes));
    char* at = packed;
    for (size_t r = 0; r < size; ++r) {
      ForEachRow(before_[me], Intersect(before_[me], after_[r]), [&](int64_t offset, int64_t n) {
        std::memcpy(at, static_cast<const char*>(x.data) + offset * unit,
                    static_cast<size_t>(n * unit));
        at += n * unit;
      });
    }
    channel.AllToAll(packed, send, received, recv);
    const char* from = received;
    for (size_t r = 0; r < size; ++r) {
      ForEachRow(after_[me], Intersect(before_[r], after_[me]), [&](int64_t offset, int64_t n) {
        std::memcpy(out + offset * unit, from, static_cast<size_t>(n * unit));
        from += n * unit;
      });
    }
  }

 private:
  Dims Rest(const Input& x) const {
    return {x.shape.begin() + static_cast<int64_t>(before_.at(0).begin.size()), x.shape.end()};
  }

  std::vector<Block> before_, after_;  // [rank]
  std::string text_;
};

}  // namespace

std::unique_ptr<Operation> MakeRepartition(const Params& params) {
  return std::make_unique<Repartition>(params);
}

}  // namespace gradred::diff
