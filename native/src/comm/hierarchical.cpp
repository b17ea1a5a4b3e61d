#include "comm/hierarchical.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

#include "base/status.h"
#include "comm/alloc_on_all.h"
#include "comm/hierarchical_queue.h"

namespace gradred::comm {
namespace {

using reduce::Range;

int CeilLog2(int n) {
  int k = 0;
  while ((int64_t{1} << k) < n) ++k;
  return k;
}

class Hierarchical : public Communicator {
 public:
  Hierarchical(HierarchicalParts parts, std::unique_ptr<Communicator> flat)
      : flat_(std::move(flat)),
        queue_(MakeHierarchicalQueue(std::move(parts), flat_->transport())) {
    const Topology& t = queue_->parts().topology;
    const int largest = LargestNode(t);
    residual_ = std::ldexp(1.0, CeilLog2(largest) + CeilLog2(t.nodes())) / t.size;
  }

  static int LargestNode(const Topology& t) { return NodeSizes(t).back(); }
  static int SmallestNode(const Topology& t) { return NodeSizes(t).front(); }

  int rank() const override { return queue_->parts().topology.rank; }
  int size() const override { return queue_->parts().topology.size; }
  std::string name() const override {
    const HierarchicalParts& p = queue_->parts();
    std::string text = "hierarchical: " + p.intra->name() + " in the node";
    if (p.inter)
      text += ", " + p.inter->name() + " between " + std::to_string(p.topology.nodes()) + " nodes";
    return text;
  }
  Transport& transport() override { return flat_->transport(); }
  SegmentPtr Alloc(int64_t nbytes) override { return queue_->parts().intra->Alloc(nbytes); }
  WorkPtr AllocOnAll(int64_t nbytes, SegmentPtr* segment) override {
    return AgreeOnSegment(*flat_, queue_->parts().intra->AllocOnAll(nbytes, segment), segment);
  }
  double average_residual() const override { return residual_; }

  WorkPtr AllReduce(Segment& segment, int64_t offset, LayoutPtr layout) override {
    return queue_->Start(segment, offset, std::move(layout));
  }
  WorkPtr AllReduceCargo(LayoutPtr layout, CargoPtr cargo) override {
    return queue_->Start(std::move(layout), std::move(cargo));
  }
  int64_t window_nbytes() const override { return queue_->window_nbytes(); }
  // The parts are not those of the nodes, so all is reduced: the same bits as AllReduce, at its
  // price.
  WorkPtr ReduceScatter(Segment& segment, int64_t offset, LayoutPtr layout,
                        std::vector<Range> parts) override {
    if (static_cast<int>(parts.size()) != size())
      throw Error(Kind::kInternal, "reduce_scatter: expected " + std::to_string(size()) +
                                       " parts, got " + std::to_string(parts.size()));
    return AllReduce(segment, offset, std::move(layout));
  }
  WorkPtr AllGather(Segment& segment, int64_t offset, std::vector<Range> parts) override {
    return flat_->AllGather(segment, offset, std::move(parts));
  }

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
  static std::vector<int> NodeSizes(const Topology& t) {
    std::vector<int> sizes(static_cast<size_t>(t.nodes()), 0);
    for (int node : t.node_of) ++sizes[static_cast<size_t>(node)];
    std::sort(sizes.begin(), sizes.end());
    return sizes;
  }

  std::unique_ptr<Communicator> flat_;
  std::shared_ptr<HierarchicalQueue> queue_;
  double residual_ = 1;
};

void Expect(bool ok, const Topology& t, const std::string& what) {
  if (!ok)
    throw Error(Kind::kInternal, "rank " + std::to_string(t.rank) + ": hierarchical of " +
                                     std::to_string(t.size) + " ranks on " +
                                     std::to_string(t.nodes()) + " nodes: expected " + what);
}

// Exponent k of the 2^-k by which averages of halves are scaled in `c`, which its residual tells.
int Halvings(Communicator& c, const Topology& t, const char* which) {
  const double power = c.average_residual() * c.size();
  const int k = static_cast<int>(std::lround(std::log2(power)));
  Expect(std::abs(std::ldexp(1.0, k) / power - 1) < 1e-9 && k >= 0, t,
         std::string(which) + " communicator that scales averages of halves by a power of two");
  return k;
}

}  // namespace

std::unique_ptr<Communicator> MakeHierarchical(const Topology& t,
                                               std::unique_ptr<Communicator> intra,
                                               std::unique_ptr<Communicator> inter,
                                               std::unique_ptr<Communicator> flat,
                                               const HierarchicalOptions& options) {
  HierarchicalParts parts;
  parts.owners = Hierarchical::SmallestNode(t);
  Expect(flat && flat->size() == t.size && flat->rank() == t.rank, t,
         "a flat communicator of all ranks");
  Expect(intra && intra->size() == t.local_size && intra->rank() == t.local_rank, t,
         "an intra communicator of the node's " + std::to_string(t.local_size) + " ranks");
  const bool owner = t.local_rank < parts.owners && t.nodes() > 1;
  Expect(owner == (inter != nullptr) || (t.nodes() == 1 && inter), t,
         "an inter communicator on the first " + std::to_string(parts.owners) +
             " ranks of a node and none on others");
  const int scaled = Halvings(*intra, t, "an intra");
  parts.missing_halvings = CeilLog2(Hierarchical::LargestNode(t)) - scaled;
  Expect(parts.missing_halvings >= 0, t,
         "an intra communicator that scales averages of halves by no less than 2^-" +
             std::to_string(scaled + parts.missing_halvings));
  if (inter) {
    Expect(inter->size() == t.nodes() && inter->rank() == t.node_of[static_cast<size_t>(t.rank)], t,
           "an inter communicator with one rank a node, in the nodes' order");
    Expect(Halvings(*inter, t, "an inter") == CeilLog2(t.nodes()), t,
           "an inter communicator that scales averages of halves by 2^-ceil(log2(nodes))");
  }
  parts.topology = t;
  parts.intra = std::move(intra);
  parts.inter = std::move(inter);
  parts.options = options;
  return std::make_unique<Hierarchical>(std::move(parts), std::move(flat));
}

}  // namespace gradred::comm
