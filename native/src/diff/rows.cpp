// Operations on rows, the parts of a tensor along its first dimension, of which each rank may have
// another number: allgather, reduce_scatter, gather, scatter, alltoall.
#include <cstring>
#include <numeric>

#include "diff/operation.h"
#include "reduce/kernels.h"

namespace gradred::diff {
namespace {

std::string RowsText(const std::string& what, const Input& x) {
  return what + " of rows of " + DTypeName(x.dtype) + " " + ToText(x.row_shape());
}

void RequireRows(const std::string& what, const Input& x) {
  if (x.shape.empty())
    throw Error(Kind::kInvalidArgument,
                what + ": a scalar, expected a tensor with a first dimension");
}

// How many rows this rank asks for.
int64_t WantedRows(const std::string& what, const Input& rows) {
  const int64_t wanted = rows.Int64s().at(0);
  if (wanted < 0)
    throw Error(Kind::kInvalidArgument,
                what + ": expected as rows a number from 0, got " + std::to_string(wanted));
  return wanted;
}

Dims WithRows(int64_t rows, const Input& x) {
  Dims shape = x.row_shape();
  shape.insert(shape.begin(), rows);
  return shape;
}

// The ranks' i-th number.
std::vector<int64_t> Column(const Numbers& numbers, size_t i) {
  std::vector<int64_t> column;
  for (const auto& mine : numbers) column.push_back(mine.at(i));
  return column;
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::vector<int64_t> Times(std::vector<int64_t> values, int64_t factor) {
  for (int64_t& value : values) value *= factor;
  return values;
}

std::string ToText(const std::vector<int64_t>& values) { return diff::ToText(Dims(values)); }

class AllGather final : public Operation {
 public:
  bool needs_numbers() const override { return true; }
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    RequireRows("allgather", inputs.at(0));
    return {RowsText("allgather", inputs[0]), {inputs[0].rows()}};
  }
  void Run(Call& call, Channel& channel, const Numbers& numbers) override {
    const Input& x = call.inputs()[0];
    const std::vector<int64_t> rows = Column(numbers, 0);
    void* out = call.Output(0, WithRows(Sum(rows), x));
    channel.AllGather(x.data, out, Times(rows, x.row_nbytes()));
  }
};

// Inputs: x, and how many rows of the sum are this rank's.
class ReduceScatter final : public Operation {
 public:
  bool needs_numbers() const override { return true; }
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    RequireRows("reduce_scatter", inputs.at(0));
    return {
        RowsText("reduce_scatter", inputs[0]) + ", " + std::to_string(inputs[0].rows()) + " in all",
        {WantedRows("reduce_scatter", inputs.at(1))}};
  }
  void Run(Call& call, Channel& channel, const Numbers& numbers) override {
    const Input& x = call.inputs()[0];
    const std::vector<int64_t> rows = Column(numbers, 0);
    if (Sum(rows) != x.rows())
      throw AgreedError(Kind::kMismatch, RowsText("reduce_scatter", x) + " in context '" +
                                             channel.name() + "': expected " +
                                             std::to_string(x.rows()) +
                                             " rows over all ranks, got " + ToText(rows));
    const size_t size = rows.size();
    const int64_t mine = rows[channel.rank()];
    void* out = call.Output(0, WithRows(mine, x));
    const int64_t nbytes = mine * x.row_nbytes();
    char* parts = static_cast<char*>(channel.Scratch(nbytes * channel.size()));
    channel.AllToAll(x.data, Times(rows, x.row_nbytes()), parts,
                     std::vector<int64_t>(size, nbytes));
    std::vector<const void*> ins;
    for (size_t r = 0; r < size; ++r) ins.push_back(parts + r * nbytes);
    const int64_t count = nbytes / DTypeSize(x.dtype);
    if (count == 0) return;
    reduce::BestLoops().reduce[static_cast<int>(reduce::ReduceOp::kSum)][static_cast<int>(x.dtype)](
        out, ins.data(), static_cast<int>(size), 0, count, 1.0f);
  }
};

class Gather final : public Operation {
 public:
  explicit Gather(int root) : root_(root) {}
  bool needs_numbers() const override { return true; }
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    RequireRows("gather", inputs.at(0));
    return {RowsText("gather to root " + std::to_string(root_), inputs[0]), {inputs[0].rows()}};
  }
  void Run(Call& call, Channel& channel, const Numbers& numbers) override {
    const Input& x = call.inputs()[0];
    const std::vector<int64_t> rows = Column(numbers, 0);
    if (channel.rank() != root_) {
      call.Output(0, WithRows(0, x));
      channel.Send(root_, x.data, x.nbytes());
    } else {
      char* out = static_cast<char*>(call.Output(0, WithRows(Sum(rows), x)));
      for (int r = 0; r < channel.size(); ++r) {
        const int64_t nbytes = rows[r] * x.row_nbytes();
        if (r == root_)
          std::memcpy(out, x.data, static_cast<size_t>(nbytes));
        else
          channel.Recv(r, out, nbytes);
        out += nbytes;
      }
    }
    channel.WaitForMessages();
  }

 private:
  const int root_;
};

// Inputs: x, whose rows are the root's (no other rank's are used), and how many this rank gets.
class Scatter final : public Operation {
 public:
  explicit Scatter(int root) : root_(root) {}
  bool needs_numbers() const override { return true; }
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    RequireRows("scatter", inputs.at(0));
    return {RowsText("scatter from root " + std::to_string(root_), inputs[0]),
            {WantedRows("scatter", inputs.at(1)), inputs[0].rows()}};
  }
  void Run(Call& call, Channel& channel, const Numbers& numbers) override {
    const Input& x = call.inputs()[0];
    const std::vector<int64_t> rows = Column(numbers, 0);
    const int64_t there = numbers.at(root_)[1];
    if (Sum(rows) != there)
      throw AgreedError(Kind::kMismatch, RowsText("scatter", x) + " in context '" + channel.name() +
                                             "': the root has " + std::to_string(there) +
                                             " rows, the ranks ask for " + ToText(rows));
    const int64_t nbytes = rows[channel.rank()] * x.row_nbytes();
    void* out = call.Output(0, WithRows(rows[channel.rank()], x));
    if (channel.rank() != root_) {
      channel.Recv(root_, out, nbytes);
    } else {
      const char* from = static_cast<const char*>(x.data);
      for (int r = 0; r < channel.size(); ++r) {
        const int64_t part = rows[r] * x.row_nbytes();
        if (r == root_)
          std::memcpy(out, from, static_cast<size_t>(part));
        else
          channel.Send(r, from, part);
        from += part;
      }
    }
    channel.WaitForMessages();
  }

 private:
  const int root_;
};

// Inputs: x, and how many of its rows go to each rank. Outputs: rows, and how many came from each.
class AllToAll final : public Operation {
 public:
  Terms TermsOf(const Inputs& inputs, const Channel& channel) const override {
    RequireRows("alltoall", inputs.at(0));
    const std::vector<int64_t> splits = inputs.at(1).Int64s();
    bool good = static_cast<int>(splits.size()) == channel.size();
    for (const int64_t n : splits) good &= n >= 0;
    if (!good || Sum(splits) != inputs[0].rows())
      throw Error(Kind::kInvalidArgument,
                  "alltoall: expected as splits " + std::to_string(channel.size()) +
                      " numbers from 0 with the sum " + std::to_string(inputs[0].rows()) +
                      ", got " + ToText(splits));
    return {RowsText("alltoall", inputs[0]), {}};
  }
  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    const std::vector<int64_t> send = call.inputs()[1].Int64s();
    auto* received = static_cast<int64_t*>(call.Output(1, {static_cast<int64_t>(channel.size())}));
    const std::vector<int64_t> one(channel.size(), sizeof(int64_t));
    channel.AllToAll(call.inputs()[1].data, one, received, one);
    const std::vector<int64_t> recv(received, received + channel.size());
    void* out = call.Output(0, WithRows(Sum(recv), x));
    channel.AllToAll(x.data, Times(send, x.row_nbytes()), out, Times(recv, x.row_nbytes()));
  }
};

}  // namespace

std::unique_ptr<Operation> MakeAllGather(const Params&) { return std::make_unique<AllGather>(); }
std::unique_ptr<Operation> MakeReduceScatter(const Params&) {
  return std::make_unique<ReduceScatter>();
}
std::unique_ptr<Operation> MakeGather(const Params& params) {
  return std::make_unique<Gather>(static_cast<int>(params.at(0)));
}
std::unique_ptr<Operation> MakeScatter(const Params& params) {
  return std::make_unique<Scatter>(static_cast<int>(params.at(0)));
}
std::unique_ptr<Operation> MakeAllToAll(const Params&) { return std::make_unique<AllToAll>(); }

}  // namespace gradred::diff
