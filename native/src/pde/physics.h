// Seam between time loops and equations: one step of the fields on a rank's block, and its adjoint.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "pde/border.h"
#include "pde/grid.h"

namespace gradred::pde {

enum class Equation { kAcoustic, kHeat };

// Equal on all ranks, but for the block and the number of threads.
struct Setting {
  Equation equation = Equation::kAcoustic;
  Block block;
  std::array<int64_t, 2> largest_block{};  // nodes along each axis of any rank's block
  std::array<double, 2> spacing{1, 1};
  double dt = 1;
  // Acoustic: nodes of the absorbing layer along every edge of the domain, none or at least 4, and
  // the speed that it is tuned for.
  int64_t layer = 0;
  double layer_speed = 0;
  int threads = 1;
};

// Begin, Step and StepAdjoint exchange borders with the neighbours: collective. Values between a
// rank's calls: u, the field that sources act on and receivers record.
template <class T>
class Physics {
 public:
  virtual ~Physics() = default;

  // At most 1 where the scheme is stable; infinite if a coefficient is not positive and finite. Of
  // this block, `coefficient` [rows, columns] dense.
  virtual double Courant(const T* coefficient) const = 0;
  // Before the other calls of an operation.
  virtual void Attach(Messages* messages) = 0;
  // Fields become zero. Courant's condition holds on all ranks.
  virtual void Begin(const T* coefficient) = 0;
  // One step; then u += source values times their weights, by the caller. `saved`: null, or
  // saved_values(extent()) values that StepAdjoint will need.
  virtual void Step(T* saved) = 0;
  // What a source value is multiplied by when it is added to u at an own node.
  virtual T SourceWeight(int64_t row, int64_t column) const = 0;

  // After Begin: cotangents become zero.
  virtual void BeginAdjoint() = 0;
  // u holds the cotangent of u after the step; afterwards that of u before it.
  virtual void StepAdjoint(const T* saved) = 0;
  // The cotangent of the coefficient, [rows, columns] dense.
  virtual void EndAdjoint(T* gradient) = 0;

  virtual T* u() = 0;
  virtual const Extent& extent() const = 0;
  virtual int64_t saved_values(const Extent& extent) const = 0;
  // All that a step reads and writes: what a checkpoint keeps.
  virtual std::vector<Field<T>*> state() = 0;
  virtual Traffic traffic() const = 0;
};

template <class T>
std::unique_ptr<Physics<T>> MakeAcoustic(const Setting& setting);
template <class T>
std::unique_ptr<Physics<T>> MakeHeat(const Setting& setting);

// Runs body(row) for the rows first ... last - 1, on `threads` threads.
template <class Body>
void ForRows(int64_t first, int64_t last, int threads, const Body& body) {
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row) body(row);
    return;
  }
#endif
  (void)threads;
  for (int64_t row = first; row < last; ++row) body(row);
}

// The nodes that a step can do before the borders have come, and the rest.
struct Inner {
  explicit Inner(const Block& block)
      : row0(block.neighbours[0] >= 0),
        row1(block.count[0] - (block.neighbours[1] >= 0)),
        column0(block.neighbours[2] >= 0),
        column1(block.count[1] - (block.neighbours[3] >= 0)) {
    row1 = std::max(row0, row1);
    column1 = std::max(column0, column1);
  }
  // part(row, first column, last column + 1) for every part of a row outside the inner nodes.
  template <class Part>
  void ForRest(const Block& block, const Part& part) const {
    const int64_t rows = block.count[0], columns = block.count[1];
    for (int64_t row = 0; row < rows; ++row) {
      if (row < row0 || row >= row1) {
        part(row, 0, columns);
        continue;
      }
      if (column0 > 0) part(row, 0, column0);
      if (column1 < columns) part(row, column1, columns);
    }
  }

  int64_t row0, row1, column0, column1;
};

// part(row, first column, last column + 1) for all nodes, the inner ones while the borders of
// border->Start are under way.
template <class T, class Part>
void ForAllAround(const Block& block, const Inner& inner, int threads, Border<T>* border,
                  const Part& part) {
  ForRows(inner.row0, inner.row1, threads,
          [&](int64_t row) { part(row, inner.column0, inner.column1); });
  border->Finish();
  inner.ForRest(block, part);
}

// The strips of one whole field's border on each side.
std::vector<Side> WholeSides(const Block& block, const Extent& extent, int field);

}  // namespace gradred::pde
