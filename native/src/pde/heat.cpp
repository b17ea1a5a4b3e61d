// Heat conduction, u = 0 outside the domain. See Note [Heat step].
#include <algorithm>
#include <cmath>
#include <limits>

#include "pde/kernels.h"
#include "pde/physics.h"

namespace gradred::pde {
namespace {

template <class T>
class Heat final : public Physics<T> {
 public:
  explicit Heat(const Setting& setting)
      : setting_(setting),
        extent_(setting.block.count, sizeof(T)),
        inner_(setting.block),
        rate0_(static_cast<T>(setting.dt / (2 * setting.spacing[0] * setting.spacing[0]))),
        rate1_(static_cast<T>(setting.dt / (2 * setting.spacing[1] * setting.spacing[1]))),
        u_(extent_.values()),
        other_(extent_.values()),
        k_(extent_.values()),
        gradient_(extent_.values()),
        border_(setting.block, WholeSides(setting.block, extent_, 0)),
        k_border_(setting.block, WholeSides(setting.block, extent_, 0)) {}

  double Courant(const T* coefficient) const override {
    const int64_t n = extent_.rows * extent_.columns;
    double largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double k = coefficient[i];
      if (!(k > 0) || !std::isfinite(k)) return std::numeric_limits<double>::infinity();
      largest = std::max(largest, k);
    }
    return 4 * largest * (static_cast<double>(rate0_) + static_cast<double>(rate1_));
  }

  void Attach(Messages* messages) override {
    border_.Attach(messages);
    k_border_.Attach(messages);
  }

  void Begin(const T* coefficient) override {
    for (int64_t row = 0; row < extent_.rows; ++row) {
      std::copy_n(coefficient + row * extent_.columns, extent_.columns,
                  k_.data() + extent_.At(row, 0));
    }
    T* fields[] = {k_.data()};
    k_border_.Start(fields);
    k_border_.Finish();
    ForEdges([&](int64_t own, int64_t outside, T) { k_.data()[outside] = k_.data()[own]; });
    u_.Clear();
  }

  void Step(T* saved) override {
    T* fields[] = {u_.data()};
    border_.Start(fields);
    ForAllAround(setting_.block, inner_, setting_.threads, &border_,
                 [&](int64_t row, int64_t first, int64_t last) { StepPart(row, first, last); });
    if (saved != nullptr) std::copy_n(u_.data(), u_.values(), saved);
    std::swap(u_, other_);
  }

  T SourceWeight(int64_t, int64_t) const override { return static_cast<T>(setting_.dt); }

  void BeginAdjoint() override {
    u_.Clear();
    gradient_.Clear();
  }

  void StepAdjoint(const T* saved) override {
    T* fields[] = {u_.data()};
    border_.Start(fields);
    ForAllAround(setting_.block, inner_, setting_.threads, &border_,
                 [&](int64_t row, int64_t first, int64_t last) {
                   StepPart(row, first, last);
                   const int64_t at = extent_.At(row, first);
                   loops_.gradient(gradient_.data() + at, saved + at, u_.data() + at,
                                   extent_.stride, last - first, rate0_, rate1_);
                 });
    // Outside the domain k is that of the edge's node: such a face depends on it wholly.
    ForEdges([&](int64_t own, int64_t, T rate) {
      gradient_.data()[own] -= rate * saved[own] * u_.data()[own];
    });
    std::swap(u_, other_);
  }

  void EndAdjoint(T* gradient) override {
    for (int64_t row = 0; row < extent_.rows; ++row) {
      std::copy_n(gradient_.data() + extent_.At(row, 0), extent_.columns,
                  gradient + row * extent_.columns);
    }
  }

  T* u() override { return u_.data(); }
  const Extent& extent() const override { return extent_; }
  int64_t saved_values(const Extent& extent) const override { return extent.values(); }
  std::vector<Field<T>*> state() override { return {&u_}; }
  Traffic traffic() const override { return border_.traffic(); }

 private:
  void StepPart(int64_t row, int64_t first, int64_t last) {
    const int64_t at = extent_.At(row, first);
    loops_.step(other_.data() + at, u_.data() + at, k_.data() + at, extent_.stride, last - first,
                rate0_, rate1_);
  }

  // visit(own node, node outside, rate) for every face at the domain's edge.
  template <class Visit>
  void ForEdges(const Visit& visit) {
    const int64_t rows = extent_.rows, columns = extent_.columns;
    const auto& neighbours = setting_.block.neighbours;
    for (int64_t column = 0; column < columns; ++column) {
      if (neighbours[0] < 0) visit(extent_.At(0, column), extent_.At(-1, column), rate0_);
      if (neighbours[1] < 0) visit(extent_.At(rows - 1, column), extent_.At(rows, column), rate0_);
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (neighbours[2] < 0) visit(extent_.At(row, 0), extent_.At(row, -1), rate1_);
      if (neighbours[3] < 0) visit(extent_.At(row, columns - 1), extent_.At(row, columns), rate1_);
    }
  }

  const HeatLoops<T>& loops_ = HeatLoopsHere<T>();
  Setting setting_;
  Extent extent_;
  Inner inner_;
  T rate0_, rate1_;
  Field<T> u_, other_, k_, gradient_;
  Border<T> border_, k_border_;
};

}  // namespace

template <class T>
std::unique_ptr<Physics<T>> MakeHeat(const Setting& setting) {
  return std::make_unique<Heat<T>>(setting);
}

template std::unique_ptr<Physics<float>> MakeHeat(const Setting&);
template std::unique_ptr<Physics<double>> MakeHeat(const Setting&);

}  // namespace gradred::pde
