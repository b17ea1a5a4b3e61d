// Messages between pairs of ranks, one rank's value for all, and a barrier.
#include <cstring>

#include "diff/operation.h"

namespace gradred::diff {
namespace {

std::string RankText(int rank) { return rank < 0 ? "nobody" : "rank " + std::to_string(rank); }

class Broadcast final : public Operation {
 public:
  explicit Broadcast(int root) : root_(root) {}
  Terms TermsOf(const Inputs& inputs, const Channel&) const override {
    const Input& x = inputs.at(0);
    return {"broadcast from root " + std::to_string(root_) + " of " + DTypeName(x.dtype) + " " +
                ToText(x.shape),
            {}};
  }
  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs()[0];
    void* out = call.Output(0, x.shape);
    if (channel.rank() == root_) std::memcpy(out, x.data, static_cast<size_t>(x.nbytes()));
    channel.Broadcast(out, x.nbytes(), root_);
  }

 private:
  const int root_;
};

// A message is preceded by what it is, so that the receiver can say what else was sent.
struct Header {
  int64_t dtype = 0, count = 0;
};

// What send, recv and sendrecv do: inputs[0] to `to`, and `shape` of the same dtype from `from`.
void ExchangeMessages(const Input& x, int to, int from, DType dtype, const Dims& shape, void* out,
                      Channel& channel) {
  auto* headers = static_cast<Header*>(channel.Scratch(2 * sizeof(Header)));
  const int64_t count = CountOf(shape);
  headers[0] = {static_cast<int64_t>(x.dtype), x.count()};
  channel.Send(to, &headers[0], sizeof(Header));
  channel.Recv(from, &headers[1], sizeof(Header));
  channel.WaitForMessages();
  channel.Send(to, x.data, x.nbytes());
  if (from >= 0) {
    const Header& got = headers[1];
    if (got.count != count || got.dtype != static_cast<int64_t>(dtype)) {
      throw Error(Kind::kMismatch, "rank " + std::to_string(channel.rank()) + " of context '" +
                                       channel.name() + "': a message from rank " +
                                       std::to_string(from) + ": expected " + DTypeName(dtype) +
                                       " " + ToText(shape) + ", got " + std::to_string(got.count) +
                                       " elements of " + DTypeName(static_cast<DType>(got.dtype)));
    }
    channel.Recv(from, out, count * DTypeSize(dtype));
  } else if (out != nullptr) {
    std::memset(out, 0, static_cast<size_t>(count * DTypeSize(dtype)));
  }
  channel.WaitForMessages();
}

class Send final : public Operation {
 public:
  explicit Send(int to) : to_(to) {}
  bool collective() const override { return false; }
  Terms TermsOf(const Inputs&, const Channel&) const override { return {}; }
  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& x = call.inputs().at(0);
    ExchangeMessages(x, to_, -1, x.dtype, {}, nullptr, channel);
  }

 private:
  const int to_;
};

// Inputs: something of the dtype and shape to receive.
class Recv final : public Operation {
 public:
  explicit Recv(int from) : from_(from) {}
  bool collective() const override { return false; }
  Terms TermsOf(const Inputs&, const Channel&) const override { return {}; }
  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input& like = call.inputs().at(0);
    ExchangeMessages(like, -1, from_, like.dtype, like.shape, call.Output(0, like.shape), channel);
  }

 private:
  const int from_;
};

// Inputs: x, and something of the dtype and shape to receive.
class SendRecv final : public Operation {
 public:
  SendRecv(int to, int from) : to_(to), from_(from) {}
  Terms TermsOf(const Inputs& inputs, const Channel& channel) const override {
    for (const int peer : {to_, from_})
      if (peer >= channel.size())
        throw Error(Kind::kInvalidArgument, "sendrecv with " + RankText(peer) +
                                                ": expected below " +
                                                std::to_string(channel.size()));
    return {std::string("sendrecv of ") + DTypeName(inputs.at(0).dtype), {}};
  }
  void Run(Call& call, Channel& channel, const Numbers&) override {
    const Input &x = call.inputs()[0], &like = call.inputs().at(1);
    ExchangeMessages(x, to_, from_, like.dtype, like.shape, call.Output(0, like.shape), channel);
  }

 private:
  const int to_, from_;
};

class Barrier final : public Operation {
 public:
  Terms TermsOf(const Inputs&, const Channel&) const override { return {"barrier", {}}; }
  void Run(Call&, Channel& channel, const Numbers&) override { channel.Barrier(); }
};

}  // namespace

std::unique_ptr<Operation> MakeBroadcast(const Params& params) {
  return std::make_unique<Broadcast>(static_cast<int>(params.at(0)));
}
std::unique_ptr<Operation> MakeSend(const Params& params) {
  return std::make_unique<Send>(static_cast<int>(params.at(0)));
}
std::unique_ptr<Operation> MakeRecv(const Params& params) {
  return std::make_unique<Recv>(static_cast<int>(params.at(0)));
}
std::unique_ptr<Operation> MakeSendRecv(const Params& params) {
  return std::make_unique<SendRecv>(static_cast<int>(params.at(0)), static_cast<int>(params.at(1)));
}
std::unique_ptr<Operation> MakeBarrier(const Params&) { return std::make_unique<Barrier>(); }

}  // namespace gradred::diff
