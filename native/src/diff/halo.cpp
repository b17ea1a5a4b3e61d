#include "diff/halo.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

namespace gradred::diff {
namespace {

constexpr struct {
  Boundary boundary;
  const char* name;
} kBoundaries[] = {{Boundary::kPeriodic, "periodic"},
                   {Boundary::kConstant, "constant"},
                   {Boundary::kReflect, "reflect"},
                   {Boundary::kSymmetric, "symmetric"}};

// Runs of a message start at multiples of this, so that elements of every dtype are aligned.
constexpr int64_t kRunAlign = 8;

int64_t MessageNbytes(const std::vector<FieldType>& fields, const std::vector<Box>& boxes) {
  int64_t nbytes = 0;
  for (const Box& box : boxes) {
    for (const FieldType& field : fields)
      nbytes += (field.nbytes(box.points()) + kRunAlign - 1) / kRunAlign * kRunAlign;
  }
  return nbytes;
}

// each(field, box, where its run lies in `message`)
template <class Byte, class Each>
void ForEachRunOf(const std::vector<FieldType>& fields, const std::vector<Box>& boxes,
                  Byte* message, const Each& each) {
  for (const Box& box : boxes) {
    for (size_t f = 0; f < fields.size(); ++f) {
      each(f, box, message);
      message += (fields[f].nbytes(box.points()) + kRunAlign - 1) / kRunAlign * kRunAlign;
    }
  }
}

void Require(bool fits, const std::string& what, const std::string& expected,
             const std::string& got) {
  if (fits) return;
  throw Error(Kind::kInvalidArgument,
              "halo exchange: " + what + ": expected " + expected + ", got " + got);
}

void CheckDimension(const HaloGrid::Dimension& dimension, int d) {
  const std::string where = "dimension " + std::to_string(d);
  const int ranks = static_cast<int>(dimension.blocks.size());
  const auto& widths = dimension.widths;
  const auto& ends = dimension.boundaries;
  Require(ranks >= 1, where + ": blocks", "1 or more", std::to_string(ranks));
  for (const int64_t width : widths)
    Require(width >= 0, where + ": width", "0 or more", std::to_string(width));
  const bool periodic = ends[0] == Boundary::kPeriodic;
  Require(periodic == (ends[1] == Boundary::kPeriodic), where + ": boundaries",
          "periodic on both sides or on none",
          std::string(BoundaryName(ends[0])) + " and " + BoundaryName(ends[1]));
  for (int c = 0; c < ranks; ++c) {
    int64_t needed = 1;
    for (const int side : {0, 1}) {
      // Who is on the other side takes this side's width from here; at the edge, the mirror does.
      const bool edge = !periodic && c == (side == 0 ? 0 : ranks - 1);
      if (!edge) {
        needed = std::max(needed, widths[1 - side]);
      } else if (widths[side] > 0 && ends[side] != Boundary::kConstant) {
        needed = std::max(needed, widths[side] + (ends[side] == Boundary::kReflect ? 1 : 0));
      }
    }
    Require(dimension.blocks[c] >= needed,
            where + ": layers of block " + std::to_string(c) + " of " + std::to_string(ranks) +
                ", with ghost layers of widths " + std::to_string(widths[0]) + " and " +
                std::to_string(widths[1]),
            std::to_string(needed) + " or more", std::to_string(dimension.blocks[c]));
  }
}

}  // namespace

const char* BoundaryName(Boundary boundary) {
  for (const auto& row : kBoundaries)
    if (row.boundary == boundary) return row.name;
  return "?";
}

bool BoundaryFromName(const std::string& name, Boundary* boundary) {
  for (const auto& row : kBoundaries) {
    if (name != row.name) continue;
    *boundary = row.boundary;
    return true;
  }
  return false;
}

int HaloGrid::ranks() const {
  int64_t ranks = 1;
  for (const Dimension& dimension : dimensions)
    ranks *= static_cast<int64_t>(dimension.blocks.size());
  return static_cast<int>(ranks);
}

HaloPlan::HaloPlan(HaloGrid grid, int rank)
    : grid_(std::move(grid)), rank_(rank), dimensions_(static_cast<int>(grid_.dimensions.size())) {
  Require(dimensions_ >= 1 && dimensions_ <= kDims, "dimensions", "1 to 3",
          std::to_string(dimensions_));
  for (int d = 0; d < dimensions_; ++d) CheckDimension(grid_.dimensions[d], d);
  Require(rank >= 0 && rank < ranks(), "rank", "less than " + std::to_string(ranks()),
          std::to_string(rank));
  grid_.dimensions.insert(grid_.dimensions.begin(), kDims - dimensions_, {{1}, {0, 0}, {}});

  for (int d = kDims - 1, rest = rank; d >= 0; --d) {
    const HaloGrid::Dimension& dimension = grid_.dimensions[d];
    coordinates_[d] = rest % ranks_along(d);
    rest /= ranks_along(d);
    interior_.begin[d] = dimension.widths[0];
    interior_.extent[d] = dimension.blocks[coordinates_[d]];
    padded_[d] = dimension.widths[0] + interior_.extent[d] + dimension.widths[1];
  }
  for (int d = 0; d < kDims; ++d) {
    const auto& widths = grid_.dimensions[d].widths;
    if (widths[0] + widths[1] == 0) continue;
    if (grid_.corners || rounds_.empty()) rounds_.emplace_back();
    AddDimension(d, &rounds_.back());
  }
}

// See Note [Corners].
Box HaloPlan::Slab(int d, int64_t begin, int64_t layers) const {
  Box box = interior_;
  for (int e = 0; e < d && grid_.corners; ++e) {
    box.begin[e] = 0;
    box.extent[e] = padded_[e];
  }
  box.begin[d] = begin;
  box.extent[d] = layers;
  return box;
}

void HaloPlan::AddRoute(Round* round, int peer, const Box* sent, const Box* received) const {
  auto route = std::find_if(round->routes.begin(), round->routes.end(),
                            [&](const Route& r) { return r.peer == peer; });
  if (route == round->routes.end()) {
    round->routes.push_back({peer, {}, {}});
    route = round->routes.end() - 1;
  }
  if (sent != nullptr) route->sent.push_back(*sent);
  if (received != nullptr) route->received.push_back(*received);
}

void HaloPlan::AddDimension(int d, Round* round) {
  const HaloGrid::Dimension& dimension = grid_.dimensions[d];
  const int64_t low = dimension.widths[0], high = dimension.widths[1];
  const int64_t begin = interior_.begin[d], end = begin + interior_.extent[d];
  const int c = coordinates_[d], ranks = ranks_along(d);
  const bool periodic = dimension.boundaries[0] == Boundary::kPeriodic;
  const bool has_lower = periodic || c > 0, has_upper = periodic || c < ranks - 1;
  int stride = 1;
  for (int e = d + 1; e < kDims; ++e) stride *= ranks_along(e);
  const int lower = rank_ + ((c + ranks - 1) % ranks - c) * stride;
  const int upper = rank_ + ((c + 1) % ranks - c) * stride;

  const Box top = Slab(d, end - low, low), bottom = Slab(d, begin, high);
  const Box below = Slab(d, 0, low), above = Slab(d, end, high);
  if (periodic && ranks == 1) {
    if (low > 0) round->mirrors.push_back({top, below});
    if (high > 0) round->mirrors.push_back({bottom, above});
  } else {
    // Upward before downward, on all ranks: both may be with the same peer.
    if (low > 0 && has_upper) AddRoute(round, upper, &top, nullptr);
    if (low > 0 && has_lower) AddRoute(round, lower, nullptr, &below);
    if (high > 0 && has_lower) AddRoute(round, lower, &bottom, nullptr);
    if (high > 0 && has_upper) AddRoute(round, upper, nullptr, &above);
    if (!has_lower) AddEdge(d, 0, round);
    if (!has_upper) AddEdge(d, 1, round);
  }

  for (int e = 0; e < d && !grid_.corners; ++e) {
    for (Box both : GhostsOf(e)) {
      for (const Box& ghosts : GhostsOf(d)) {
        both.begin[d] = ghosts.begin[d];
        both.extent[d] = ghosts.extent[d];
        zeros_.push_back(both);
      }
    }
  }
}

// The side of the domain: 0 below, 1 above.
void HaloPlan::AddEdge(int d, int side, Round* round) const {
  const HaloGrid::Dimension& dimension = grid_.dimensions[d];
  const int64_t begin = interior_.begin[d], end = begin + interior_.extent[d];
  const int64_t width = dimension.widths[side];
  const Boundary boundary = dimension.boundaries[side];
  if (boundary == Boundary::kConstant) {
    round->constants.push_back(Slab(d, side == 0 ? 0 : end, width));
    return;
  }
  const int64_t skip = boundary == Boundary::kReflect ? 1 : 0;
  for (int64_t k = 0; k < width; ++k) {
    const int64_t layer = side == 0 ? begin + skip + k : end - 1 - skip - k;
    const int64_t ghost = side == 0 ? begin - 1 - k : end + k;
    round->mirrors.push_back({Slab(d, layer, 1), Slab(d, ghost, 1)});
  }
}

std::array<Box, 2> HaloPlan::GhostsOf(int d) const {
  Box low{{}, padded_}, high = low;
  low.extent[d] = grid_.dimensions[d].widths[0];
  high.begin[d] = interior_.begin[d] + interior_.extent[d];
  high.extent[d] = grid_.dimensions[d].widths[1];
  return {low, high};
}

HaloTraffic HaloPlan::Traffic(const std::vector<FieldType>& fields, bool adjoint) const {
  HaloTraffic traffic;
  for (const Round& round : rounds_) {
    for (const Route& route : round.routes) {
      const int64_t nbytes = MessageNbytes(fields, adjoint ? route.received : route.sent);
      if (nbytes == 0) continue;
      traffic.peers.push_back(route.peer);
      traffic.nbytes += nbytes;
    }
  }
  return traffic;
}

void HaloPlan::ToPadded(const FieldType& field, const void* interior, void* padded) const {
  Unpack(field, padded_, interior_, interior, padded);
}

void HaloPlan::ToInterior(const FieldType& field, const void* padded, void* interior) const {
  Pack(field, padded_, interior_, padded, interior);
}

HaloExchange::HaloExchange(const HaloPlan& plan, Channel& channel, std::vector<FieldType> fields,
                           bool adjoint)
    : plan_(plan), channel_(channel), fields_(std::move(fields)), adjoint_(adjoint) {
  Require(plan.ranks() == channel.size(), "ranks of the grid", std::to_string(channel.size()),
          std::to_string(plan.ranks()));
  for (const FieldType& field : fields_)
    Require(IsFloating(field.dtype), "dtype of a field", "a floating one", DTypeName(field.dtype));
  int64_t most_sent = 0, most_received = 0;
  for (const HaloPlan::Round& round : plan.rounds_) {
    int64_t sent = 0, received = 0;
    for (const HaloPlan::Route& route : round.routes) {
      sent += MessageNbytes(fields_, adjoint ? route.received : route.sent);
      received += MessageNbytes(fields_, adjoint ? route.sent : route.received);
    }
    most_sent = std::max(most_sent, sent);
    most_received = std::max(most_received, received);
  }
  if (most_sent > 0) sent_ = static_cast<char*>(channel.Scratch(most_sent));
  if (most_received > 0) received_ = static_cast<char*>(channel.Scratch(most_received));
}

const HaloPlan::Round& HaloExchange::round(size_t step) const {
  const auto& rounds = plan_.rounds_;
  return rounds[adjoint_ ? rounds.size() - 1 - step : step];
}

void HaloExchange::Start(std::vector<void*> arrays) {
  Require(arrays.size() == fields_.size(), "arrays", std::to_string(fields_.size()),
          std::to_string(arrays.size()));
  arrays_ = std::move(arrays);
  if (!plan_.rounds_.empty()) Begin(round(0));
}

void HaloExchange::Finish() {
  for (size_t step = 0; step < plan_.rounds_.size(); ++step) {
    if (step > 0) Begin(round(step));
    End(round(step));
  }
  const auto clear = [this](const Box& box) {
    for (size_t f = 0; f < fields_.size(); ++f)
      FillBox(fields_[f], plan_.padded_, box, 0, arrays_[f]);
  };
  if (adjoint_) {
    for (int d = 0; d < kDims; ++d)
      for (const Box& box : plan_.GhostsOf(d)) clear(box);
  } else {
    for (const Box& box : plan_.zeros_) clear(box);
  }
}

void HaloExchange::Begin(const HaloPlan::Round& round) {
  char* sent = sent_;
  char* received = received_;
  for (const HaloPlan::Route& route : round.routes) {
    const std::vector<Box>& in = adjoint_ ? route.sent : route.received;
    const int64_t nbytes = MessageNbytes(fields_, in);
    if (nbytes > 0) channel_.Recv(route.peer, received, nbytes);
    received += nbytes;
  }
  for (const HaloPlan::Route& route : round.routes) {
    const std::vector<Box>& out = adjoint_ ? route.received : route.sent;
    const int64_t nbytes = MessageNbytes(fields_, out);
    ForEachRunOf(fields_, out, sent, [&](size_t f, const Box& box, char* at) {
      Pack(fields_[f], plan_.padded_, box, arrays_[f], at);
    });
    if (nbytes > 0) channel_.Send(route.peer, sent, nbytes);
    sent += nbytes;
  }
}

void HaloExchange::End(const HaloPlan::Round& round) {
  const GridShape& shape = plan_.padded_;
  for (size_t f = 0; f < fields_.size(); ++f) {
    for (const HaloPlan::Mirror& mirror : round.mirrors) {
      if (adjoint_)
        AddBox(fields_[f], shape, mirror.ghosts, mirror.layers, arrays_[f]);
      else
        CopyBox(fields_[f], shape, mirror.layers, mirror.ghosts, arrays_[f]);
    }
    for (const Box& box : round.constants) {
      if (!adjoint_) FillBox(fields_[f], shape, box, plan_.grid_.constant, arrays_[f]);
    }
  }
  channel_.WaitForMessages();
  // In the order of routes: sums must not depend on which message came first.
  const char* received = received_;
  for (const HaloPlan::Route& route : round.routes) {
    const std::vector<Box>& in = adjoint_ ? route.sent : route.received;
    ForEachRunOf(fields_, in, received, [&](size_t f, const Box& box, const char* at) {
      (adjoint_ ? UnpackAdd : Unpack)(fields_[f], shape, box, at, arrays_[f]);
    });
    received += MessageNbytes(fields_, in);
  }
}

void HaloForward(const HaloPlan& plan, Channel& channel, const std::vector<FieldType>& fields,
                 const std::vector<const void*>& in, const std::vector<void*>& out) {
  HaloExchange exchange(plan, channel, fields, false);
  for (size_t f = 0; f < fields.size(); ++f) plan.ToPadded(fields[f], in[f], out[f]);
  exchange.Start(out);
  exchange.Finish();
}

void HaloAdjoint(const HaloPlan& plan, Channel& channel, const std::vector<FieldType>& fields,
                 const std::vector<const void*>& in, const std::vector<void*>& out) {
  HaloExchange exchange(plan, channel, fields, true);
  std::vector<void*> arrays;
  for (size_t f = 0; f < fields.size(); ++f) {
    const int64_t nbytes = fields[f].nbytes(Points(plan.padded()));
    arrays.push_back(channel.Scratch(nbytes));
    if (nbytes > 0) std::memcpy(arrays[f], in[f], nbytes);
  }
  exchange.Start(arrays);
  exchange.Finish();
  for (size_t f = 0; f < fields.size(); ++f) plan.ToInterior(fields[f], arrays[f], out[f]);
}

}  // namespace gradred::diff
