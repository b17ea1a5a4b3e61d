// Halo exchange: the border layers of a rank's block to the ghost layers of its neighbours, and the
// adjoint of that.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "diff/box.h"
#include "diff/channel.h"

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

// What one exchange sends from this rank.
struct HaloTraffic {
  std::vector<int> peers;  // one a message
  int64_t nbytes = 0;
};

// Note [Corners]
// Dimensions are exchanged one after the other. Slabs of a dimension take the ghost layers of the
// earlier ones with them, so values reach diagonal neighbours in as many steps as dimensions, with
// two messages a dimension instead of one for each of up to 26 neighbours. The adjoint runs the
// dimensions backward: what was received last goes back first, and its corners land in ghost layers
// that go back in turn.

// The exchange is an affine map of the interior; its adjoint is that of the linear part. Immutable.
class HaloPlan {
 public:
  // `rank`: the caller's place in the grid, and its rank in the context. Throws kInvalidArgument,
  // alike on all ranks, for widths beyond what the blocks can give.
  HaloPlan(HaloGrid grid, int rank);

  int rank() const { return rank_; }
  int ranks() const { return grid_.ranks(); }
  int dimensions() const { return dimensions_; }
  const GridShape& interior() const { return interior_.extent; }  // of this rank's block
  const GridShape& padded() const { return padded_; }             // with ghost layers
  HaloTraffic Traffic(const std::vector<FieldType>& fields, bool adjoint) const;

  // Between an array of the interior and the interior of a padded one.
  void ToPadded(const FieldType& field, const void* interior, void* padded) const;
  void ToInterior(const FieldType& field, const void* padded, void* interior) const;

 private:
  friend class HaloExchange;
  // Boxes are of the padded array. The k-th sent box becomes the k-th received one of the peer.
  struct Route {
    int peer;
    std::vector<Box> sent, received;
  };
  struct Mirror {
    Box layers, ghosts;
  };
  struct Round {
    std::vector<Route> routes;
    std::vector<Mirror> mirrors;  // within the block
    std::vector<Box> constants;
  };

  int ranks_along(int d) const { return static_cast<int>(grid_.dimensions[d].blocks.size()); }
  void AddDimension(int d, Round* round);
  void AddEdge(int d, int side, Round* round) const;
  void AddRoute(Round* round, int peer, const Box* sent, const Box* received) const;
  Box Slab(int d, int64_t begin, int64_t layers) const;
  std::array<Box, 2> GhostsOf(int d) const;

  HaloGrid grid_;
  const int rank_;
  int dimensions_ = 0;
  std::array<int, kDims> coordinates_{};
  GridShape padded_{};
  Box interior_;
  std::vector<Round> rounds_;
  std::vector<Box> zeros_;  // corners, where they are not exchanged
};

// From integers: rank, corners, bits of the constant, dimensions; of each dimension its widths and
// boundaries, below and above, the number of its blocks and their layers.
HaloPlan ReadHaloPlan(const std::vector<int64_t>& params);

// The exchanges of one operation, in place on arrays of padded shape, all fields to a neighbour in
// one message. Forward sets the ghost layers. The adjoint adds them to the border layers that they
// came from, here and on the neighbours, and sets them to zero; sums of halves are rounded after
// each dimension. Used any number of times; collective. Plan and channel outlive it.
class HaloExchange {
 public:
  // Takes its scratch memory from the channel. Throws kInvalidArgument for a dtype that is not
  // floating, and for a grid that is not of the channel's ranks.
  HaloExchange(const HaloPlan& plan, Channel& channel, std::vector<FieldType> fields, bool adjoint);

  // Between the two calls the layers that are sent, as deep as the widths, and the ghost layers
  // must not change; the rest of the block may.
  void Start(std::vector<void*> arrays);
  void Finish();

 private:
  void Begin(const HaloPlan::Round& round);
  void End(const HaloPlan::Round& round);
  const HaloPlan::Round& round(size_t step) const;

  const HaloPlan& plan_;
  Channel& channel_;
  const std::vector<FieldType> fields_;
  const bool adjoint_;
  char* sent_ = nullptr;
  char* received_ = nullptr;
  std::vector<void*> arrays_;
};

// From arrays of the interior to padded ones, and from padded cotangents to those of the interior.
void HaloForward(const HaloPlan& plan, Channel& channel, const std::vector<FieldType>& fields,
                 const std::vector<const void*>& in, const std::vector<void*>& out);
void HaloAdjoint(const HaloPlan& plan, Channel& channel, const std::vector<FieldType>& fields,
                 const std::vector<const void*>& in, const std::vector<void*>& out);

}  // namespace gradred::diff
