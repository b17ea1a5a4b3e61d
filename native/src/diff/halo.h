// Halo exchange: the border layers of a rank's block to the ghost layers of its neighbours, and the
// adjoint of that.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/transport.h"
#include "diff/box.h"

namespace gradred::diff {

// What ghost layers beyond the edge of the domain hold; low and high side may differ, except for
// kPeriodic.
enum class Boundary : uint8_t {
  kPeriodic,   // the layers at the other end
  kConstant,   // HaloGrid::constant
  kReflect,    // mirrored at the outermost layer: b a [ a is layer 0 ] a b c -> c b | a b c
  kSymmetric,  // mirrored at the edge: b a | a b c
};
const char* BoundaryName(Boundary boundary);  // "periodic", ...
bool BoundaryFromName(const std::string& name, Boundary* boundary);

// A Cartesian grid of ranks and their blocks, equal on all ranks. The last dimension varies
// fastest, in arrays and in the order of ranks.
struct HaloGrid {
  struct Dimension {
    std::vector<int64_t> blocks;           // layers of each block; as many as ranks
    std::array<int64_t, 2> widths{};       // ghost layers below and above each block
    std::array<Boundary, 2> boundaries{};  // of the domain, below and above
  };
  std::vector<Dimension> dimensions;  // 1 to 3
  double constant = 0;
  // False: ghost points beyond more than one side hold zero, and one round of messages is enough;
  // for stencils that do not read them.
  bool corners = true;

  int ranks() const;
};

// What one exchange sends from this rank, the messages to itself left out.
struct HaloTraffic {
  std::vector<int> peers;  // ranks of the transport, one a message
  int64_t nbytes = 0;
};

// Note [Corners]
// Dimensions are exchanged one after the other. Slabs of a dimension take the ghost layers of the
// earlier ones with them, so values reach diagonal neighbours in as many steps as dimensions, with
// two messages a dimension instead of one for each of up to 26 neighbours. The adjoint runs the
// dimensions backward: what was received last goes back first, and its corners land in ghost layers
// that go back in turn.

// The exchange is an affine map of the interior; its adjoint is that of the linear part. Local
// calls: nothing is sent before a Work is made. Used by one thread; outlives its works.
class HaloPlan {
 public:
  // `members[r]`: rank of the transport at place r of the grid. `rank`: the caller's place. Throws
  // kInvalidArgument, alike on all ranks, for a grid that does not fit the members and for widths
  // beyond what the blocks can give.
  HaloPlan(HaloGrid grid, std::vector<int> members, int rank);

  const Shape& interior() const { return interior_.extent; }  // of this rank's block
  const Shape& padded() const { return padded_; }             // with ghost layers
  HaloTraffic Traffic(const std::vector<FieldType>& fields, bool adjoint) const;

  // In place: arrays of padded shape, one a field, all fields to a neighbour in one message.
  // Forward sets the ghost layers. The adjoint adds them to the border layers that they came from,
  // here and on the neighbours, and sets them to zero. Sums of halves are rounded after each
  // dimension. Collective; `tag`: see PeerMessages.
  comm::WorkPtr Exchange(comm::Transport& transport, comm::Tag tag, std::vector<FieldType> fields,
                         std::vector<void*> arrays) const;
  comm::WorkPtr ExchangeAdjoint(comm::Transport& transport, comm::Tag tag,
                                std::vector<FieldType> fields, std::vector<void*> arrays) const;

  // From arrays of the interior to padded ones, and from padded cotangents to those of the
  // interior.
  comm::WorkPtr Forward(comm::Transport& transport, comm::Tag tag, std::vector<FieldType> fields,
                        std::vector<const void*> in, std::vector<void*> out) const;
  comm::WorkPtr Adjoint(comm::Transport& transport, comm::Tag tag, std::vector<FieldType> fields,
                        std::vector<const void*> in, std::vector<void*> out) const;

 private:
  friend class HaloWork;
  // Boxes are of the padded array. The k-th sent box becomes the k-th received one of the peer.
  struct Route {
    int peer;
    std::vector<Box> sent, received;
  };
  struct Mirror {
    Box layer, ghost;
  };
  struct Round {
    std::vector<Route> routes;
    std::vector<Mirror> mirrors;
    std::vector<Box> constants;
  };

  int ranks_along(int d) const { return static_cast<int>(grid_.dimensions[d].blocks.size()); }
  int place() const;  // in the grid
  void AddDimension(int d, Round* round);
  void AddEdge(int d, int side, Round* round) const;
  void AddRoute(Round* round, int place, const Box* sent, const Box* received) const;
  Box Slab(int d, int64_t begin, int64_t layers) const;
  std::array<Box, 2> GhostsOf(int d) const;
  void Check(const std::vector<FieldType>& fields, size_t arrays) const;

  HaloGrid grid_;
  const std::vector<int> members_;
  std::array<int, kDims> coordinates_{};
  Shape padded_{};
  Box interior_;
  std::vector<Round> rounds_;
  std::vector<Box> zeros_;  // corners, where they are not exchanged
  std::shared_ptr<comm::BufferPool> pool_ = std::make_shared<comm::BufferPool>();
};

}  // namespace gradred::diff
