// NCCL against the stand-in libraries of native/standin: ranks are threads, device memory is host
// memory. That is why the conformance suite and the tests here may read and write segments
// directly.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/dynlib.h"
#include "base/status.h"
#include "comm/algorithm_communicator.h"
#include "comm/loopback/hub.h"
#include "comm/nccl/nccl_api.h"
#include "comm/nccl/nccl_communicator.h"
#include "conformance.h"
#include "ranks.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::comm;
using reduce::Layout;
using reduce::ReduceOp;

namespace {

constexpr Nanos kLimit = 60 * kSecond;

std::shared_ptr<const nccl::Api> OpenStandIns() {
  return nccl::OpenApi(GRADRED_NCCL_STANDIN, GRADRED_CUDART_STANDIN);
}

// Everything that the stand-ins have handed out has come back.
void CheckNothingIsLeft() {
  const auto api = OpenStandIns();
  const auto live = [](const DynLib& library, const char* name) {
    return reinterpret_cast<int (*)()>(library.Require(name))();
  };
  CHECK_EQ(live(api->nccl.library, "StandinNcclLive"), 0);
  CHECK_EQ(live(api->cuda.library, "StandinCudaLive"), 0);
}

nccl::NcclOptions Options() {
  nccl::NcclOptions options;
  options.nccl_library = GRADRED_NCCL_STANDIN;
  options.cudart_library = GRADRED_CUDART_STANDIN;
  options.channel = 3;
  options.timeout = kLimit;
  return options;
}

std::vector<int> AllOf(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

struct Rank {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Communicator> communicator;
  int rank = 0, size = 0;

  void WaitFor(const WorkPtr& work, const std::string& what) {
    ThrowIfError(Wait(*work, *transport, kLimit, what));
  }
};

// body(rank) in threads, each with a communicator on a device of its own. Afterwards nothing may be
// left.
template <class Body>
void WithRanks(int size, const nccl::NcclOptions& options, Body body) {
  const auto hub = std::make_shared<LoopbackHub>(size);
  testing::RunRanks(size, [&](int r) {
    Rank rank;
    rank.rank = r;
    rank.size = size;
    rank.transport = hub->MakeTransport(r);
    rank.communicator = nccl::MakeNcclCommunicator(
        MakeAlgorithmCommunicator(*rank.transport, AllOf(size), 1), r, options);
    body(rank);
  });
  CheckNothingIsLeft();
}

LayoutPtr One(int64_t count, DType dtype, ReduceOp op = ReduceOp::kSum) {
  return std::make_shared<const Layout>(std::vector<reduce::Section>{{0, count, dtype, op}});
}

bool NcclHas(const reduce::Section& s) {
  return s.dtype != DType::kInt16 && s.dtype != DType::kUint16 && s.op != ReduceOp::kBitAnd;
}

// What NCCL does not have: copied to host memory, reduced by messages, copied back.
class RestWork : public Work {
 public:
  using Start = std::function<WorkPtr(Segment&, LayoutPtr)>;
  RestWork(WorkPtr nccl, Communicator& rest, void* data, LayoutPtr layout, const Start& start)
      : nccl_(std::move(nccl)),
        segment_(rest.Alloc(layout->nbytes())),
        data_(static_cast<char*>(data)),
        layout_(std::move(layout)) {
    Copy(static_cast<char*>(segment_->data()), data_);
    rest_ = start(*segment_, layout_);
  }

 private:
  bool Advance() override {
    if (!nccl_->Poll() || !rest_->Poll()) return false;
    ThrowIfError(nccl_->status());
    ThrowIfError(rest_->status());
    Copy(data_, static_cast<char*>(segment_->data()));
    return true;
  }
  void Copy(char* to, const char* from) const {
    for (const reduce::Section& s : layout_->sections())
      std::memcpy(to + s.offset, from + s.offset,
                  static_cast<size_t>(s.count * DTypeSize(s.dtype)));
  }
  WorkPtr nccl_;
  SegmentPtr segment_;
  char* data_;
  LayoutPtr layout_;
  WorkPtr rest_;
};

// The suite wants every dtype and operation in one layout. What NCCL does not have goes over
// messages, on the same segments.
class NcclAndTheRest : public Communicator {
 public:
  NcclAndTheRest(Communicator& nccl, Communicator& rest) : nccl_(nccl), rest_(rest) {}
  int rank() const override { return nccl_.rank(); }
  int size() const override { return nccl_.size(); }
  std::string name() const override { return nccl_.name(); }
  Transport& transport() override { return nccl_.transport(); }
  double average_residual() const override { return nccl_.average_residual(); }
  SegmentPtr Alloc(int64_t nbytes) override { return nccl_.Alloc(nbytes); }
  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    return WithRest(
        nccl_.AllReduce(segment, offset, Select(*layout, true)), segment, offset, *layout,
        [this](Segment& host, LayoutPtr rest) { return rest_.AllReduce(host, 0, rest); });
  }
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<reduce::Range> parts) override {
    WorkPtr nccl = nccl_.ReduceScatter(segment, offset, Select(*layout, true), parts);
    return WithRest(
        std::move(nccl), segment, offset, *layout, [this, parts](Segment& host, LayoutPtr rest) {
          std::vector<reduce::Range> clipped;
          for (const reduce::Range& p : parts)
            clipped.push_back({std::min(p.begin, rest->nbytes()), std::min(p.end, rest->nbytes())});
          return rest_.ReduceScatter(host, 0, rest, clipped);
        });
  }
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<reduce::Range> parts) override {
    return nccl_.AllGather(segment, offset, std::move(parts));
  }
  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    return nccl_.AllGatherV(mine, all, std::move(nbytes));
  }
  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return nccl_.Broadcast(data, nbytes, root);
  }
  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    return nccl_.AllToAllV(in, std::move(send), out, std::move(recv));
  }
  WorkPtr Barrier() override { return nccl_.Barrier(); }
  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    return nccl_.Union(blob, std::move(merge));
  }

 private:
  static LayoutPtr Select(const Layout& layout, bool nccl_has) {
    std::vector<reduce::Section> sections;
    for (const reduce::Section& s : layout.sections())
      if (NcclHas(s) == nccl_has) sections.push_back(s);
    return std::make_shared<const Layout>(std::move(sections));
  }
  WorkPtr WithRest(WorkPtr nccl, Segment& segment, int64_t offset, const Layout& layout,
                   const RestWork::Start& start) {
    return std::make_unique<RestWork>(std::move(nccl), rest_,
                                      static_cast<char*>(segment.data()) + offset,
                                      Select(layout, false), start);
  }
  Communicator& nccl_;
  Communicator& rest_;
};

}  // namespace

TEST(ConformsOnOneToFourRanks) {
  for (int size = 1; size <= 4; ++size)
    WithRanks(size, Options(), [&](Rank& r) {
      const auto rest = MakeAlgorithmCommunicator(*r.transport, AllOf(size), 2);
      NcclAndTheRest both(*r.communicator, *rest);
      conformance::ConformanceOptions options;
      options.name = "NCCL stand-in";
      options.ordered = false;
      options.averages =
          false;  // rounds small ones away: see AveragesOfHalvesAreScaledBeforeTheSum
      conformance::CheckCommunicator(both, options);
    });
}

TEST(AveragesOfHalvesAreScaledBeforeTheSum) {
  for (int size : {2, 3, 4})
    for (int scale_size : {0, 4}) {
      nccl::NcclOptions options = Options();
      options.scale_size = scale_size;
      WithRanks(size, options, [&](Rank& r) {
        const int halvings = size == 2 && scale_size == 0 ? 1 : 2;
        CHECK_EQ(r.communicator->average_residual(), std::ldexp(1.0, halvings) / size);
        for (DType dtype : {DType::kFloat16, DType::kBfloat16}) {
          const LayoutPtr layout = One(3, dtype, ReduceOp::kAverage);
          const SegmentPtr segment = r.communicator->Alloc(layout->nbytes());
          uint16_t* const data = static_cast<uint16_t*>(segment->data());
          // The sums of the first would be infinite; the others are exact after the scaling.
          const float values[] = {40960.0f, 4.0f * static_cast<float>(r.rank),
                                  std::ldexp(1.0f, -20)};
          for (int i = 0; i < 3; ++i)
            data[i] =
                dtype == DType::kFloat16 ? ToFloat16(values[i]).bits : ToBfloat16(values[i]).bits;
          r.WaitFor(r.communicator->AllReduce(*segment, 0, layout), "allreduce");
          const auto got = [&](int i) {
            return dtype == DType::kFloat16 ? ToFloat(Float16{data[i]})
                                            : ToFloat(Bfloat16{data[i]});
          };
          const float scale = std::ldexp(1.0f, -halvings);
          CHECK_EQ(got(0), 40960.0f * static_cast<float>(size) * scale);
          CHECK_EQ(got(1), 4.0f * static_cast<float>(size * (size - 1) / 2) * scale);
          CHECK_EQ(got(2), std::ldexp(1.0f, -20) * static_cast<float>(size) * scale);
        }
      });
    }
}

TEST(PartsOfAnySizeAndOrder) {
  WithRanks(3, Options(), [](Rank& r) {
    constexpr int64_t kCount = 200;
    const LayoutPtr layout = One(kCount, DType::kInt32);
    const int64_t end = layout->nbytes();  // 832, of which 800 are elements
    const std::vector<std::vector<reduce::Range>> all_parts = {
        {{0, 256}, {256, 512}, {512, 768}},  // equal: NCCL's own collectives
        {{512, end}, {0, 64}, {64, 512}},
        {{0, end}, {end, end}, {end, end}},
        {{end, end}, {0, end}, {end, end}}};
    for (const auto& parts : all_parts) {
      const SegmentPtr segment = r.communicator->Alloc(64 + end);
      int32_t* const data = reinterpret_cast<int32_t*>(static_cast<char*>(segment->data()) + 64);
      for (int i = 0; i < kCount; ++i) data[i] = 1000 * r.rank + i;
      r.WaitFor(r.communicator->ReduceScatter(*segment, 64, layout, parts), "reduce_scatter");
      const reduce::Range mine = parts[static_cast<size_t>(r.rank)];
      const auto covered = [&](int64_t i) {
        return std::any_of(parts.begin(), parts.end(), [&](const reduce::Range& p) {
          return 4 * i >= p.begin && 4 * i < p.end;
        });
      };
      for (int64_t i = mine.begin / 4; i < std::min(mine.end / 4, kCount); ++i)
        CHECK_EQ(data[i], 3000 + 3 * i);
      r.WaitFor(r.communicator->AllGather(*segment, 64, parts), "allgather");
      for (int64_t i = 0; i < kCount; ++i)
        if (covered(i)) CHECK_EQ(data[i], 3000 + 3 * i);
    }
  });
}

TEST(WhatNcclLacksIsUnsupported) {
  WithRanks(1, Options(), [](Rank& r) {
    Communicator& c = *r.communicator;
    CHECK(c.name().find("NCCL 2.23.4") == 0 &&
          c.name().find("not reproducible") != std::string::npos);
    const SegmentPtr segment = c.Alloc(1024);
    CHECK(segment->space() == Space::kDevice);
    CHECK_ERROR(c.AllReduce(*segment, 0, One(4, DType::kInt16)), Kind::kUnsupported,
                "NCCL has no sum of int16");
    CHECK_ERROR(c.AllReduce(*segment, 0, One(4, DType::kUint8, ReduceOp::kBitAnd)),
                Kind::kUnsupported, "bit-and");
    CHECK_ERROR(c.AllReduce(*segment, 32, One(4, DType::kFloat32)), Kind::kInvalidArgument,
                "offset 32");
    CHECK_ERROR(c.AllReduce(*segment, 0, One(400, DType::kFloat32)), Kind::kInvalidArgument,
                "1024 bytes of device");
    CHECK_ERROR(c.Alloc(int64_t{1} << 40), Kind::kUnsupported, "1099511627776 bytes");
    CHECK_ERROR(c.Alloc(-1), Kind::kInvalidArgument, "-1 bytes");
    const auto flat = MakeAlgorithmCommunicator(*r.transport, {0}, 2);
    const SegmentPtr host = flat->Alloc(1024);
    CHECK_ERROR(c.AllReduce(*host, 0, One(4, DType::kFloat32)), Kind::kInvalidArgument,
                "bytes of host memory");
  });
}

TEST(MissingLibrariesAndDevicesFailOnAllRanks) {
  CHECK_ERROR(nccl::OpenApi("/nonexistent/libnccl.so.2", GRADRED_CUDART_STANDIN),
              Kind::kUnsupported, "libnccl");
  CHECK_ERROR(nccl::OpenApi(GRADRED_CUDART_STANDIN, GRADRED_CUDART_STANDIN), Kind::kUnsupported,
              "ncclGetVersion");
  const auto hub = std::make_shared<LoopbackHub>(3);
  testing::RunRanks(3, [&](int r) {
    const auto transport = hub->MakeTransport(r);
    nccl::NcclOptions options = Options();
    if (r == 1) options.nccl_library = "/nonexistent/libnccl.so.2";
    CHECK_ERROR(
        nccl::MakeNcclCommunicator(MakeAlgorithmCommunicator(*transport, AllOf(3), 1), r, options),
        Kind::kUnsupported, "rank 1: NCCL: ");
    CHECK_ERROR(nccl::MakeNcclCommunicator(MakeAlgorithmCommunicator(*transport, AllOf(3), 2),
                                           r + 2, Options()),
                Kind::kUnsupported, "rank 2: NCCL: CUDA device 4: this process sees 4");
  });
  CheckNothingIsLeft();
}

// After an abort no library is called any more, so these two leave streams behind: they come after
// the tests that count.
TEST(RanksThatDisagreeEndWithAnError) {
  const auto hub = std::make_shared<LoopbackHub>(2);
  testing::RunRanks(2, [&](int r) {
    const auto transport = hub->MakeTransport(r);
    auto communicator = nccl::MakeNcclCommunicator(
        MakeAlgorithmCommunicator(*transport, AllOf(2), 1), r, Options());
    const SegmentPtr segment = communicator->Alloc(1024);
    const WorkPtr work = communicator->AllReduce(*segment, 0, One(10 + r, DType::kFloat32));
    const Status status = Wait(*work, *transport, kLimit, "allreduce");
    CHECK_EQ(std::string(KindName(status.kind())), KindName(Kind::kTransportError));
    CHECK(status.message().find("do not match") != std::string::npos);
    CHECK(status.message().find("allreduce by NCCL failed with 5") != std::string::npos);
  });
}

TEST(AnAbortEndsWhatWaitsForPeers) {
  const auto hub = std::make_shared<LoopbackHub>(2);
  testing::RunRanks(2, [&](int r) {
    const auto transport = hub->MakeTransport(r);
    auto communicator = nccl::MakeNcclCommunicator(
        MakeAlgorithmCommunicator(*transport, AllOf(2), 1), r, Options());
    const SegmentPtr segment = communicator->Alloc(1024);
    if (r == 1) {  // never calls; waits for the other's word
      char byte = 0;
      const WorkPtr word = transport->Recv(0, {9, 0}, &byte, 1);
      ThrowIfError(Wait(*word, *transport, kLimit, "the end of the other rank"));
      return;
    }
    const LayoutPtr layout = One(10, DType::kFloat32);
    const WorkPtr first = communicator->AllReduce(*segment, 0, layout);
    const WorkPtr second = communicator->AllReduce(*segment, 128, layout);
    CHECK(!first->Poll());
    const char byte = 1;
    const WorkPtr word = transport->Send(1, {9, 0}, &byte, 1);
    ThrowIfError(Wait(*word, *transport, kLimit, "a word to the other rank"));
    transport->Abort({Kind::kPeerLost, "rank 1 is gone"});
    CHECK_EQ(Wait(*second, *transport, kLimit, "second").message(), std::string("rank 1 is gone"));
    CHECK_EQ(Wait(*first, *transport, kLimit, "first").message(), std::string("rank 1 is gone"));
    CHECK_ERROR(communicator->AllReduce(*segment, 0, layout), Kind::kPeerLost, "rank 1 is gone");
  });
}

// The stand-ins themselves: misuse that the real libraries would not always report.
TEST(TheStandInsRefuseMisuse) {
  const auto api = OpenStandIns();
  const auto& cuda = api->cuda;
  const auto& nccl = api->nccl;
  CHECK_EQ(cuda.cudaSetDevice(7), 101);
  CHECK_EQ(cuda.cudaSetDevice(0), 0);
  void* data = nullptr;
  int on_stack = 0;
  CHECK_EQ(cuda.cudaMalloc(&data, 256), 0);
  CHECK_EQ(cuda.cudaFree(&on_stack), 1);
  nccl::cudaStream_t stream = nullptr;
  nccl::cudaEvent_t event = nullptr;
  CHECK_EQ(cuda.cudaStreamCreateWithFlags(&stream, nccl::kCudaStreamNonBlocking), 0);
  CHECK_EQ(cuda.cudaEventCreateWithFlags(&event, nccl::kCudaEventDisableTiming), 0);
  int back = 0;
  const int forth = 42;
  CHECK_EQ(cuda.cudaMemcpyAsync(data, &forth, sizeof forth, nccl::kCudaMemcpyDefault, stream), 0);
  CHECK_EQ(cuda.cudaMemcpyAsync(&back, data, sizeof back, 1, stream), 1);  // not to the device
  CHECK_EQ(cuda.cudaMemcpyAsync(&back, data, sizeof back, 2, stream), 0);
  CHECK_EQ(cuda.cudaStreamSynchronize(stream), 0);
  CHECK_EQ(back, 42);

  nccl::ncclUniqueId id = {};
  nccl::ncclComm_t comm = nullptr;
  CHECK_EQ(nccl.ncclCommInitRank(&comm, 1, id, 0), 4);  // an id that ncclGetUniqueId has not made
  CHECK_EQ(nccl.ncclGetUniqueId(&id), 0);
  CHECK_EQ(nccl.ncclCommInitRank(&comm, 1, id, 0), 0);
  CHECK_EQ(nccl.ncclAllReduce(&on_stack, data, 1, nccl::kNcclInt32, nccl::kNcclSum, comm, stream),
           4);
  CHECK_ERROR(NCCL_CHECK(*api, comm, ncclAllReduce, &on_stack, data, 1, nccl::kNcclInt32,
                         nccl::kNcclSum, comm, stream),
              Kind::kTransportError,
              "ncclAllReduce failed with 4 (invalid argument): stand-in: ncclAllReduce: sendbuff");
  CHECK_EQ(nccl.ncclAllReduce(data, data, 65, nccl::kNcclInt32, nccl::kNcclSum, comm, stream),
           4);  // too long
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, 99, nccl::kNcclSum, comm, stream), 4);
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, nccl::kNcclInt32, 17, comm, stream), 4);
  CHECK_EQ(nccl.ncclAllReduce(data, static_cast<char*>(data) + 4, 4, nccl::kNcclInt32,
                              nccl::kNcclSum, comm, stream),
           4);
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, nccl::kNcclInt32, nccl::kNcclSum, comm, nullptr), 1);
  CHECK_EQ(cuda.cudaSetDevice(1), 0);
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, nccl::kNcclInt32, nccl::kNcclSum, comm, stream), 5);
  CHECK_EQ(cuda.cudaSetDevice(0), 0);
  CHECK_EQ(nccl.ncclGroupEnd(), 5);
  CHECK_EQ(nccl.ncclGroupStart(), 0);
  CHECK_EQ(nccl.ncclBroadcast(data, data, 4, nccl::kNcclInt32, 1, comm, stream),
           4);  // no such root
  CHECK_EQ(nccl.ncclGroupEnd(), 4);
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, nccl::kNcclInt32, nccl::kNcclSum, comm, stream), 0);
  CHECK_EQ(cuda.cudaEventRecord(event, stream), 0);
  CHECK_EQ(cuda.cudaStreamSynchronize(stream), 0);
  CHECK_EQ(cuda.cudaEventQuery(event), 0);
  CHECK_EQ(nccl.ncclCommDestroy(comm), 0);
  CHECK_EQ(nccl.ncclCommDestroy(comm), 4);
  CHECK_EQ(nccl.ncclAllReduce(data, data, 4, nccl::kNcclInt32, nccl::kNcclSum, comm, stream), 4);
  CHECK_EQ(cuda.cudaEventDestroy(event), 0);
  CHECK_EQ(cuda.cudaEventQuery(event), 400);
  CHECK_EQ(cuda.cudaStreamDestroy(stream), 0);
  CHECK_EQ(cuda.cudaStreamSynchronize(stream), 400);
  CHECK_EQ(cuda.cudaFree(data), 0);
  CHECK_EQ(cuda.cudaFree(data), 1);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
