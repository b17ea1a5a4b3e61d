#include "diff/halo.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"
#include "comm/peer_messages.h"
#include "comm/stepped_work.h"

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

HaloPlan::HaloPlan(HaloGrid grid, std::vector<int> members, int rank)
    : grid_(std::move(grid)), members_(std::move(members)) {
  const int given = static_cast<int>(grid_.dimensions.size());
  Require(given >= 1 && given <= kDims, "dimensions", "1 to 3", std::to_string(given));
  const int size = static_cast<int>(members_.size());
  Require(grid_.ranks() == size, "ranks of the grid", std::to_string(size),
          std::to_string(grid_.ranks()));
  Require(rank >= 0 && rank < size, "rank", "less than " + std::to_string(size),
          std::to_string(rank));
  for (int d = 0; d < given; ++d) CheckDimension(grid_.dimensions[d], d);
  grid_.dimensions.insert(grid_.dimensions.begin(), kDims - given, {{1}, {0, 0}, {}});

  for (int d = kDims - 1, rest = rank; d >= 0; --d) {
    const HaloGrid::Dimension& dimension = grid_.dimensions[d];
    const int ranks = static_cast<int>(dimension.blocks.size());
    coordinates_[d] = rest % ranks;
    rest /= ranks;
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

int HaloPlan::place() const {
  int place = 0;
  for (int d = 0; d < kDims; ++d) place = place * ranks_along(d) + coordinates_[d];
  return place;
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

void HaloPlan::AddRoute(Round* round, int place, const Box* sent, const Box* received) const {
  const int peer = members_[place];
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
  const int lower = place() + ((c + ranks - 1) % ranks - c) * stride;
  const int upper = place() + ((c + 1) % ranks - c) * stride;

  // Upward before downward, on all ranks: both may be with the same peer.
  const Box top = Slab(d, end - low, low), bottom = Slab(d, begin, high);
  const Box below = Slab(d, 0, low), above = Slab(d, end, high);
  if (low > 0 && has_upper) AddRoute(round, upper, &top, nullptr);
  if (low > 0 && has_lower) AddRoute(round, lower, nullptr, &below);
  if (high > 0 && has_lower) AddRoute(round, lower, &bottom, nullptr);
  if (high > 0 && has_upper) AddRoute(round, upper, nullptr, &above);
  if (!has_lower) AddEdge(d, 0, round);
  if (!has_upper) AddEdge(d, 1, round);

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
  const int own = members_[place()];
  for (const Round& round : rounds_) {
    for (const Route& route : round.routes) {
      const int64_t nbytes = MessageNbytes(fields, adjoint ? route.received : route.sent);
      if (route.peer == own || nbytes == 0) continue;
      traffic.peers.push_back(route.peer);
      traffic.nbytes += nbytes;
    }
  }
  return traffic;
}

// Both directions, in place.
class HaloWork : public comm::SteppedWork {
 public:
  HaloWork(const HaloPlan& plan, comm::Transport& transport, comm::Tag tag,
           std::vector<FieldType> fields, std::vector<void*> arrays, bool adjoint)
      : plan_(plan),
        transport_(transport),
        tag_(tag),
        fields_(std::move(fields)),
        arrays_(std::move(arrays)),
        adjoint_(adjoint) {
    Next([this] { Begin(0); });
  }

  // The arrays lie in `scratch`; at the end their interior goes to `out`.
  void TakeOut(std::vector<comm::BufferPool::Buffer> scratch, std::vector<void*> out) {
    scratch_ = std::move(scratch);
    out_ = std::move(out);
  }

 private:
  void Begin(size_t step) {
    const auto& rounds = plan_.rounds_;
    if (step == rounds.size()) return Finish();
    const HaloPlan::Round& round = rounds[adjoint_ ? rounds.size() - 1 - step : step];
    messages_ = std::make_shared<comm::PeerMessages>(transport_, tag_, plan_.pool_);
    for (const HaloPlan::Route& route : round.routes) {
      const std::vector<Box>& sent = adjoint_ ? route.received : route.sent;
      const std::vector<Box>& received = adjoint_ ? route.sent : route.received;
      const int number = messages_->Add(route.peer, MessageNbytes(fields_, sent),
                                        MessageNbytes(fields_, received));
      ForEachRunOf(fields_, sent, messages_->sent(number), [&](size_t f, const Box& box, char* at) {
        Pack(fields_[f], plan_.padded_, box, arrays_[f], at);
      });
    }
    messages_->Start();
    Await(messages_);
    Next([this, step, &round] {
      End(round);
      Begin(step + 1);
    });
  }

  void End(const HaloPlan::Round& round) {
    const Shape& shape = plan_.padded_;
    for (size_t f = 0; f < fields_.size(); ++f) {
      for (const HaloPlan::Mirror& mirror : round.mirrors) {
        if (adjoint_)
          AddBox(fields_[f], shape, mirror.ghost, mirror.layer, arrays_[f]);
        else
          CopyBox(fields_[f], shape, mirror.layer, mirror.ghost, arrays_[f]);
      }
      for (const Box& box : round.constants) {
        if (!adjoint_) FillBox(fields_[f], shape, box, plan_.grid_.constant, arrays_[f]);
      }
    }
    // Only now, in the order of routes: sums must not depend on which message came first.
    for (size_t i = 0; i < round.routes.size(); ++i) {
      const HaloPlan::Route& route = round.routes[i];
      ForEachRunOf(fields_, adjoint_ ? route.sent : route.received,
                   messages_->received(static_cast<int>(i)),
                   [&](size_t f, const Box& box, const char* at) {
                     (adjoint_ ? UnpackAdd : Unpack)(fields_[f], shape, box, at, arrays_[f]);
                   });
    }
    messages_.reset();
  }

  void Finish() {
    for (size_t f = 0; f < fields_.size(); ++f) {
      if (!out_.empty()) {
        Pack(fields_[f], plan_.padded_, plan_.interior_, arrays_[f], out_[f]);
      } else if (adjoint_) {
        for (int d = 0; d < kDims; ++d) {
          for (const Box& box : plan_.GhostsOf(d))
            FillBox(fields_[f], plan_.padded_, box, 0, arrays_[f]);
        }
      } else {
        for (const Box& box : plan_.zeros_) FillBox(fields_[f], plan_.padded_, box, 0, arrays_[f]);
      }
    }
    scratch_.clear();
  }

  const HaloPlan& plan_;
  comm::Transport& transport_;
  const comm::Tag tag_;
  const std::vector<FieldType> fields_;
  const std::vector<void*> arrays_;
  const bool adjoint_;
  std::vector<comm::BufferPool::Buffer> scratch_;
  std::vector<void*> out_;
  std::shared_ptr<comm::PeerMessages> messages_;
};

void HaloPlan::Check(const std::vector<FieldType>& fields, size_t arrays) const {
  Require(fields.size() == arrays, "arrays", std::to_string(fields.size()), std::to_string(arrays));
  for (const FieldType& field : fields)
    Require(IsFloating(field.dtype), "dtype of a field", "a floating one", DTypeName(field.dtype));
}

comm::WorkPtr HaloPlan::Exchange(comm::Transport& transport, comm::Tag tag,
                                 std::vector<FieldType> fields, std::vector<void*> arrays) const {
  Check(fields, arrays.size());
  auto work = std::make_unique<HaloWork>(*this, transport, tag, std::move(fields),
                                         std::move(arrays), false);
  work->Poll();  // what can go out goes out now
  return work;
}

comm::WorkPtr HaloPlan::ExchangeAdjoint(comm::Transport& transport, comm::Tag tag,
                                        std::vector<FieldType> fields,
                                        std::vector<void*> arrays) const {
  Check(fields, arrays.size());
  auto work =
      std::make_unique<HaloWork>(*this, transport, tag, std::move(fields), std::move(arrays), true);
  work->Poll();
  return work;
}

comm::WorkPtr HaloPlan::Forward(comm::Transport& transport, comm::Tag tag,
                                std::vector<FieldType> fields, std::vector<const void*> in,
                                std::vector<void*> out) const {
  Check(fields, in.size());
  Check(fields, out.size());
  for (size_t f = 0; f < fields.size(); ++f) Unpack(fields[f], padded_, interior_, in[f], out[f]);
  return Exchange(transport, tag, std::move(fields), std::move(out));
}

comm::WorkPtr HaloPlan::Adjoint(comm::Transport& transport, comm::Tag tag,
                                std::vector<FieldType> fields, std::vector<const void*> in,
                                std::vector<void*> out) const {
  Check(fields, in.size());
  Check(fields, out.size());
  std::vector<comm::BufferPool::Buffer> scratch;
  std::vector<void*> arrays;
  for (size_t f = 0; f < fields.size(); ++f) {
    const int64_t nbytes = fields[f].nbytes(Points(padded_));
    scratch.push_back(comm::BufferPool::Take(pool_, nbytes));
    arrays.push_back(scratch.back().data());
    if (nbytes > 0) std::memcpy(arrays.back(), in[f], nbytes);
  }
  auto work =
      std::make_unique<HaloWork>(*this, transport, tag, std::move(fields), std::move(arrays), true);
  work->TakeOut(std::move(scratch), std::move(out));
  work->Poll();
  return work;
}

}  // namespace gradred::diff
