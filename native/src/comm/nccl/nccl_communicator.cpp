#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "comm/nccl/nccl_device.h"

namespace gradred::comm::nccl {
namespace {

using reduce::Range;
using reduce::ReduceOp;
using reduce::Section;

// Calls between the ends of this object start together. Left without End, by an exception, it still
// closes the group.
class Group {
 public:
  explicit Group(const Device& device) : device_(device) {
    NCCL_CHECK(device_.api(), device_.comm(), ncclGroupStart);
  }
  ~Group() {
    if (open_) (void)device_.api().nccl.ncclGroupEnd();
  }
  void End() {
    open_ = false;
    NCCL_CHECK(device_.api(), device_.comm(), ncclGroupEnd);
  }

 private:
  const Device& device_;
  bool open_ = true;
};

struct Typed {
  ncclDataType_t type;
  ncclRedOp_t op;
};

// True where the parts have one size and follow one another in rank order.
bool EqualInOrder(const std::vector<Range>& parts) {
  for (size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].nbytes() != parts[0].nbytes()) return false;
    if (r > 0 && parts[r].begin != parts[r - 1].end) return false;
  }
  return true;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> flat, std::shared_ptr<Device> device,
                   double residual)
      : flat_(std::move(flat)), device_(std::move(device)), residual_(residual) {}

  int rank() const override { return flat_->rank(); }
  int size() const override { return flat_->size(); }
  std::string name() const override {
    const int v = device_->api().nccl.version;
    return "NCCL " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." +
           std::to_string(v % 100) + " (order of sums not reproducible)";
  }
  Transport& transport() override { return flat_->transport(); }
  double average_residual() const override { return residual_; }
  SegmentPtr Alloc(int64_t nbytes) override { return MakeDeviceSegment(*device_, nbytes); }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override;
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<Range> parts) override;
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<Range> parts) override;

  WorkPtr AllGatherV(const void* mine, void* all, std::vector<int64_t> nbytes) override {
    return flat_->AllGatherV(mine, all, std::move(nbytes));
  }
  WorkPtr Broadcast(void* data, int64_t nbytes, int root) override {
    return flat_->Broadcast(data, nbytes, root);
  }
  WorkPtr AllToAllV(const void* in, std::vector<int64_t> send, void* out,
                    std::vector<int64_t> recv) override {
    return flat_->AllToAllV(in, std::move(send), out, std::move(recv));
  }
  WorkPtr Barrier() override { return flat_->Barrier(); }
  WorkPtr Union(std::string* blob, MergeFunction merge) override {
    return flat_->Union(blob, std::move(merge));
  }

 private:
  char* Check(Segment& segment, int64_t offset, int64_t nbytes, const char* what) const;
  void CheckParts(const std::vector<Range>& parts, const char* what) const;
  std::vector<Typed> TypesOf(const reduce::Layout& layout, const char* what) const;
  std::string Where(const char* what) const {
    return "rank " + std::to_string(rank()) + ": " + what + " by NCCL";
  }

  std::unique_ptr<Communicator> flat_;
  std::shared_ptr<Device> device_;
  const double residual_;
};

char* NcclCommunicator::Check(Segment& segment, int64_t offset, int64_t nbytes,
                              const char* what) const {
  if (segment.space() != Space::kDevice || offset < 0 || offset % reduce::kAlign != 0 ||
      offset + nbytes > segment.nbytes()) {
    throw Error(Kind::kInvalidArgument,
                Where(what) + ": expected device memory of at least " + std::to_string(nbytes) +
                    " bytes at an offset that is a multiple of " + std::to_string(reduce::kAlign) +
                    ", got " + std::to_string(segment.nbytes()) + " bytes of " +
                    (segment.space() == Space::kDevice ? "device" : "host") +
                    " memory and offset " + std::to_string(offset));
  }
  return static_cast<char*>(segment.data()) + offset;
}

void NcclCommunicator::CheckParts(const std::vector<Range>& parts, const char* what) const {
  if (static_cast<int>(parts.size()) == size()) return;
  throw Error(Kind::kInvalidArgument, Where(what) + ": expected " + std::to_string(size()) +
                                          " parts, got " + std::to_string(parts.size()));
}

// Of each section. Throws before anything is started, so that the ranks fail alike.
std::vector<Typed> NcclCommunicator::TypesOf(const reduce::Layout& layout, const char* what) const {
  // In the order of DType; bool is reduced by its bytes, which are 0 and 1.
  constexpr ncclDataType_t kNone = -1;
  constexpr ncclDataType_t kTypes[kDTypeCount] = {
      kNcclUint8, kNcclUint8, kNone,        kNcclUint32,   kNcclUint64,  kNcclInt8,   kNone,
      kNcclInt32, kNcclInt64, kNcclFloat16, kNcclBfloat16, kNcclFloat32, kNcclFloat64};
  std::vector<Typed> types;
  for (const Section& s : layout.sections()) {
    const bool is_bool = s.dtype == DType::kBool;
    Typed t{kTypes[static_cast<int>(s.dtype)], kNone};
    switch (s.op) {
      case ReduceOp::kSum:
        t.op = is_bool ? kNcclMax : kNcclSum;
        break;
      case ReduceOp::kProduct:
        t.op = is_bool ? kNcclMin : kNcclProd;
        break;
      case ReduceOp::kMin:
        t.op = kNcclMin;
        break;
      case ReduceOp::kMax:
        t.op = kNcclMax;
        break;
      case ReduceOp::kAverage:
        t.op = device_->average_op(s.dtype);
        break;
      case ReduceOp::kBitAnd:
        break;
    }
    if (t.type == kNone || t.op == kNone) {
      throw Error(Kind::kUnsupported, Where(what) + ": NCCL has no " + reduce::ReduceOpName(s.op) +
                                          " of " + DTypeName(s.dtype) +
                                          "; reduce it on the host or cast it before");
    }
    types.push_back(t);
  }
  return types;
}

WorkPtr NcclCommunicator::AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) {
  char* const data = Check(segment, offset, layout->nbytes(), "allreduce");
  const std::vector<Typed> types = TypesOf(*layout, "allreduce");
  device_->Enter();
  Group group(*device_);
  for (size_t i = 0; i < types.size(); ++i) {
    const Section& s = layout->sections()[i];
    if (s.count == 0) continue;
    NCCL_CHECK(device_->api(), device_->comm(), ncclAllReduce, data + s.offset, data + s.offset,
               static_cast<size_t>(s.count), types[i].type, types[i].op, device_->comm(),
               device_->stream());
  }
  group.End();
  return device_->Record(device_, Where("allreduce"));
}

WorkPtr NcclCommunicator::ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                                        std::vector<Range> parts) {
  char* const data = Check(segment, offset, layout->nbytes(), "reduce_scatter");
  CheckParts(parts, "reduce_scatter");
  const std::vector<Typed> types = TypesOf(*layout, "reduce_scatter");
  device_->Enter();
  Group group(*device_);
  for (size_t i = 0; i < types.size(); ++i) {
    const Section& s = layout->sections()[i];
    const int64_t width = DTypeSize(s.dtype), end = s.offset + s.count * width;
    std::vector<Range> cuts;
    for (const Range& part : parts) {
      const int64_t begin = std::clamp(part.begin, s.offset, end);
      cuts.push_back({begin, std::clamp(part.end, begin, end)});
    }
    if (EqualInOrder(cuts)) {
      if (cuts[0].nbytes() == 0) continue;
      NCCL_CHECK(device_->api(), device_->comm(), ncclReduceScatter, data + cuts[0].begin,
                 data + cuts[static_cast<size_t>(rank())].begin,
                 static_cast<size_t>(cuts[0].nbytes() / width), types[i].type, types[i].op,
                 device_->comm(), device_->stream());
      continue;
    }
    for (int r = 0; r < size(); ++r) {
      const Range& cut = cuts[static_cast<size_t>(r)];
      if (cut.nbytes() == 0) continue;
      NCCL_CHECK(device_->api(), device_->comm(), ncclReduce, data + cut.begin, data + cut.begin,
                 static_cast<size_t>(cut.nbytes() / width), types[i].type, types[i].op, r,
                 device_->comm(), device_->stream());
    }
  }
  group.End();
  return device_->Record(device_, Where("reduce_scatter"));
}

WorkPtr NcclCommunicator::AllGather(Segment& segment, int64_t offset, std::vector<Range> parts) {
  CheckParts(parts, "allgather");
  int64_t end = 0;
  for (const Range& part : parts) end = std::max(end, part.end);
  char* const data = Check(segment, offset, end, "allgather");
  device_->Enter();
  Group group(*device_);
  if (EqualInOrder(parts)) {
    if (parts[0].nbytes() > 0) {
      NCCL_CHECK(device_->api(), device_->comm(), ncclAllGather,
                 data + parts[static_cast<size_t>(rank())].begin, data + parts[0].begin,
                 static_cast<size_t>(parts[0].nbytes()), kNcclInt8, device_->comm(),
                 device_->stream());
    }
  } else {
    for (int r = 0; r < size(); ++r) {
      const Range& part = parts[static_cast<size_t>(r)];
      if (part.nbytes() == 0) continue;
      NCCL_CHECK(device_->api(), device_->comm(), ncclBroadcast, data + part.begin,
                 data + part.begin, static_cast<size_t>(part.nbytes()), kNcclInt8, r,
                 device_->comm(), device_->stream());
    }
  }
  group.End();
  return device_->Record(device_, Where("allgather"));
}

// Throws on every rank if one rank has a `failure`: none may enter ncclCommInitRank, which waits
// for all.
void AgreeThatAllCan(Communicator& flat, const std::string& failure, Nanos timeout) {
  std::string first = failure;
  const auto lesser = [](const std::string& a, const std::string& b) {
    return a.empty() ? b : b.empty() ? a : std::min(a, b);
  };
  const WorkPtr work = flat.Union(&first, lesser);
  ThrowIfError(Wait(*work, flat.transport(), timeout, "agreeing on NCCL"));
  if (!first.empty()) throw Error(Kind::kUnsupported, first);
}

}  // namespace

std::unique_ptr<Communicator> MakeNcclCommunicator(std::unique_ptr<Communicator> flat,
                                                   int device_number, const NcclOptions& options) {
  std::shared_ptr<Device> device;
  ncclUniqueId id = {};
  std::string failure;
  try {
    device = std::make_shared<Device>(OpenApi(options.nccl_library, options.cudart_library),
                                      device_number, flat->transport(), options.channel);
    if (flat->rank() == 0) NCCL_CHECK(device->api(), nullptr, ncclGetUniqueId, &id);
  } catch (const Error& error) {
    failure = "rank " + std::to_string(flat->rank()) + ": NCCL: " + error.what();
  }
  AgreeThatAllCan(*flat, failure, options.timeout);
  const WorkPtr broadcast = flat->Broadcast(&id, sizeof id, 0);
  ThrowIfError(Wait(*broadcast, flat->transport(), options.timeout, "broadcast of NCCL's id"));

  const int scale_size = options.scale_size > 0 ? options.scale_size : flat->size();
  int halvings = 0;
  while ((int64_t{1} << halvings) < scale_size) ++halvings;
  device->Join(id, flat->rank(), flat->size(), std::ldexp(1.0f, -halvings));
  const double residual = std::ldexp(1.0, halvings) / flat->size();
  return std::make_unique<NcclCommunicator>(std::move(flat), std::move(device), residual);
}

}  // namespace gradred::comm::nccl
