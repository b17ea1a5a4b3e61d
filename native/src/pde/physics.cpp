#include "pde/physics.h"

namespace gradred::pde {

std::vector<Side> WholeSides(const Block& block, const Extent& extent, int field) {
  const int64_t rows = block.count[0], columns = block.count[1], stride = extent.stride;
  const auto row = [&](int64_t r) { return Strip{field, extent.At(r, 0), columns, 1}; };
  const auto column = [&](int64_t c) { return Strip{field, extent.At(0, c), rows, stride}; };
  return {{0, {row(0)}, {row(-1)}},
          {1, {row(rows - 1)}, {row(rows)}},
          {2, {column(0)}, {column(-1)}},
          {3, {column(columns - 1)}, {column(columns)}}};
}

}  // namespace gradred::pde
