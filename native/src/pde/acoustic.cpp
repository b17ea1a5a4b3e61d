// The acoustic wave equation with a perfectly matched layer. See Note [Acoustic step].
#include <algorithm>
#include <cmath>
#include <limits>

#include "pde/kernels.h"
#include "pde/physics.h"

namespace gradred::pde {
namespace {

// A wave that crosses the layer twice comes back at this part of its amplitude.
constexpr double kReflection = 1e-4;

// Damping at the nodes first - 1 ... last of an axis: quadratic in the layer, zero outside the
// domain. The node where the layer begins has none.
template <class T>
std::vector<T> DampingAlong(const Setting& setting, int axis) {
  const int64_t nodes = setting.block.global[axis], layer = setting.layer;
  const double thickness = layer * setting.spacing[axis];
  const double strongest =
      layer == 0 ? 0 : -1.5 * setting.layer_speed * std::log(kReflection) / thickness;
  std::vector<T> damping;
  const int64_t begin = setting.block.begin[axis], end = begin + setting.block.count[axis];
  for (int64_t node = begin - 1; node <= end; ++node) {
    const bool inside = node >= 0 && node < nodes;
    const int64_t depth = std::max<int64_t>({layer - node, node - (nodes - 1 - layer), 0});
    const double part = inside && layer > 0 ? static_cast<double>(depth) / layer : 0;
    damping.push_back(static_cast<T>(strongest * part * part));
  }
  return damping;
}

// The own nodes of an axis before which, and from which on, the layer's loops are needed: one node
// more than are damped, since these read the auxiliary fields beside them.
struct Layer {
  Layer(const Setting& setting, int axis) {
    const int64_t nodes = setting.block.global[axis], begin = setting.block.begin[axis],
                  count = setting.block.count[axis];
    if (setting.layer == 0) {
      end_first = 0;
      begin_second = count;
      return;
    }
    end_first = std::clamp<int64_t>(setting.layer + 1 - begin, 0, count);
    begin_second = std::clamp<int64_t>(nodes - 1 - setting.layer - begin, end_first, count);
  }
  bool Has(int64_t node) const { return node < end_first || node >= begin_second; }
  int64_t end_first, begin_second;
};

template <class T>
class Acoustic final : public Physics<T> {
 public:
  explicit Acoustic(const Setting& setting)
      : setting_(setting),
        extent_(setting.block.count, sizeof(T)),
        inner_(setting.block),
        spacing_(SpacingOf(setting)),
        damping0_(DampingAlong<T>(setting, 0)),
        damping1_(DampingAlong<T>(setting, 1)),
        layer0_(setting, 0),
        layer1_(setting, 1),
        u_(extent_.values()),
        other_(extent_.values()),
        k_(extent_.values()),
        phi_(extent_.values()),
        psi_(extent_.values()),
        gradient_(extent_.values()),
        border_(setting.block, StepSides()),
        k_border_(setting.block, WholeSides(setting.block, extent_, 0)) {}

  double Courant(const T* coefficient) const override {
    const int64_t n = extent_.rows * extent_.columns;
    double largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double m = coefficient[i];
      if (!(m > 0) || !std::isfinite(m)) return std::numeric_limits<double>::infinity();
      largest = std::max(largest, m);
    }
    return std::sqrt(largest) * setting_.dt *
           std::sqrt(1 / (setting_.spacing[0] * setting_.spacing[0]) +
                     1 / (setting_.spacing[1] * setting_.spacing[1]));
  }

  void Attach(Messages* messages) override {
    border_.Attach(messages);
    k_border_.Attach(messages);
  }

  void Begin(const T* coefficient) override {
    for (int64_t row = 0; row < extent_.rows; ++row) {
      for (int64_t column = 0; column < extent_.columns; ++column) {
        k_.data()[extent_.At(row, column)] =
            coefficient[row * extent_.columns + column] * SourceWeight(row, column);
      }
    }
    T* fields[] = {k_.data()};
    k_border_.Start(fields);
    k_border_.Finish();
    Clear();
  }

  void Step(T* saved) override {
    T* fields[] = {u_.data(), phi_.data(), psi_.data()};
    border_.Start(fields);
    const auto part = [&](int64_t row, int64_t first, int64_t last) {
      StepPart(row, first, last, saved);
    };
    ForAllAround(setting_.block, inner_, setting_.threads, &border_, part);
    ForLayer([&](int64_t row, int64_t first, int64_t last) {
      const int64_t at = extent_.At(row, first);
      loops_.damped_update(phi_.data() + at, psi_.data() + at, u_.data() + at, extent_.stride,
                           last - first, spacing_, DampingAt(row, first));
    });
    std::swap(u_, other_);
  }

  T SourceWeight(int64_t row, int64_t column) const override {
    const T dt = static_cast<T>(setting_.dt);
    const T half = (damping0_[row + 1] + damping1_[column + 1]) * dt / 2;
    return dt * dt * (1 / (1 + half));
  }

  void BeginAdjoint() override {
    Clear();
    gradient_.Clear();
  }

  void StepAdjoint(const T* saved) override {
    T* fields[] = {u_.data(), phi_.data(), psi_.data()};
    border_.Start(fields);
    const auto part = [&](int64_t row, int64_t first, int64_t last) {
      AdjointPart(row, first, last, saved);
    };
    ForAllAround(setting_.block, inner_, setting_.threads, &border_, part);
    ForLayer([&](int64_t row, int64_t first, int64_t last) {
      const int64_t at = extent_.At(row, first);
      loops_.damped_adjoint_update(phi_.data() + at, psi_.data() + at, u_.data() + at,
                                   k_.data() + at, extent_.stride, last - first, spacing_,
                                   DampingAt(row, first));
    });
    std::swap(u_, other_);
  }

  void EndAdjoint(T* gradient) override {
    for (int64_t row = 0; row < extent_.rows; ++row) {
      for (int64_t column = 0; column < extent_.columns; ++column) {
        gradient[row * extent_.columns + column] =
            gradient_.data()[extent_.At(row, column)] * SourceWeight(row, column);
      }
    }
  }

  T* u() override { return u_.data(); }
  const Extent& extent() const override { return extent_; }
  int64_t saved_values(const Extent& extent) const override { return extent.rows * extent.columns; }
  std::vector<Field<T>*> state() override { return {&u_, &other_, &phi_, &psi_}; }
  Traffic traffic() const override { return border_.traffic(); }

 private:
  static Spacing<T> SpacingOf(const Setting& setting) {
    const double h0 = setting.spacing[0], h1 = setting.spacing[1];
    return {static_cast<T>(1 / (h0 * h0)), static_cast<T>(1 / (h1 * h1)),
            static_cast<T>(1 / (2 * h0)), static_cast<T>(1 / (2 * h1))};
  }

  void Clear() {
    for (Field<T>* field : {&u_, &other_}) field->Clear();
    if (setting_.layer > 0) {
      for (Field<T>* field : {&phi_, &psi_}) field->Clear();
    }
  }

  Damping<T> DampingAt(int64_t row, int64_t column) const {
    return {damping0_[row], damping0_[row + 1], damping0_[row + 2], damping1_.data() + column + 1,
            static_cast<T>(setting_.dt)};
  }

  // Of u, and of the auxiliary field whose derivative crosses the side, what is not always zero.
  std::vector<Side> StepSides() const {
    const Block& block = setting_.block;
    std::vector<Side> sides = WholeSides(block, extent_, 0);
    if (setting_.layer == 0) return sides;
    for (Side& side : sides) {
      const int axis = side.side / 2;
      const bool ahead = side.side % 2 == 1;
      const int64_t last = block.count[axis] - 1;
      Add(axis, ahead ? last : 0, &side.send);
      Add(axis, ahead ? last + 1 : -1, &side.recv);
    }
    return sides;
  }

  // A row (axis 0) of phi or a column (axis 1) of psi, own or ghost: all of it in the layer, else
  // the ends that lie in the layer.
  void Add(int axis, int64_t line, std::vector<Strip>* strips) const {
    const bool damped = (axis == 0 ? damping0_ : damping1_)[line + 1] != 0;
    const Layer& across = axis == 0 ? layer1_ : layer0_;
    const int64_t count = setting_.block.count[1 - axis];
    const auto add = [&](int64_t first, int64_t end) {
      if (end <= first) return;
      const int64_t at = axis == 0 ? extent_.At(line, first) : extent_.At(first, line);
      strips->push_back({1 + axis, at, end - first, axis == 0 ? 1 : extent_.stride});
    };
    if (damped) {
      add(0, count);
    } else {
      add(0, across.end_first);
      add(across.begin_second, count);
    }
  }

  // part(row, first, last) for all nodes of the layer.
  template <class Part>
  void ForLayer(const Part& part) {
    if (setting_.layer == 0) return;
    ForRows(0, extent_.rows, setting_.threads, [&](int64_t row) {
      if (layer0_.Has(row)) return part(row, 0, extent_.columns);
      if (layer1_.end_first > 0) part(row, 0, layer1_.end_first);
      if (layer1_.begin_second < extent_.columns) part(row, layer1_.begin_second, extent_.columns);
    });
  }

  // Cuts a part of a row at the layer: damped(first, last) and free(first, last).
  template <class Damped, class Free>
  void Cut(int64_t row, int64_t first, int64_t last, const Damped& damped, const Free& free) {
    if (layer0_.Has(row)) return damped(first, last);
    const int64_t a = std::clamp(layer1_.end_first, first, last);
    const int64_t b = std::clamp(layer1_.begin_second, a, last);
    if (a > first) damped(first, a);
    if (b > a) free(a, b);
    if (last > b) damped(b, last);
  }

  void StepPart(int64_t row, int64_t first, int64_t last, T* saved) {
    T* const saved_row = saved == nullptr ? nullptr : saved + row * extent_.columns;
    const auto at = [&](int64_t column) { return extent_.At(row, column); };
    const auto save = [&](int64_t column) {
      return saved_row == nullptr ? nullptr : saved_row + column;
    };
    Cut(
        row, first, last,
        [&](int64_t a, int64_t b) {
          loops_.damped_step(other_.data() + at(a), u_.data() + at(a), k_.data() + at(a),
                             phi_.data() + at(a), psi_.data() + at(a), extent_.stride, b - a,
                             spacing_, DampingAt(row, a), save(a));
        },
        [&](int64_t a, int64_t b) {
          loops_.step(other_.data() + at(a), u_.data() + at(a), k_.data() + at(a), extent_.stride,
                      b - a, spacing_, save(a));
        });
  }

  void AdjointPart(int64_t row, int64_t first, int64_t last, const T* saved) {
    const T* const saved_row = saved + row * extent_.columns;
    const auto at = [&](int64_t column) { return extent_.At(row, column); };
    Cut(
        row, first, last,
        [&](int64_t a, int64_t b) {
          loops_.damped_adjoint(other_.data() + at(a), u_.data() + at(a), k_.data() + at(a),
                                phi_.data() + at(a), psi_.data() + at(a), extent_.stride, b - a,
                                spacing_, DampingAt(row, a), saved_row + a,
                                gradient_.data() + at(a));
        },
        [&](int64_t a, int64_t b) {
          loops_.adjoint(other_.data() + at(a), u_.data() + at(a), k_.data() + at(a),
                         extent_.stride, b - a, spacing_, saved_row + a, gradient_.data() + at(a));
        });
  }

  const AcousticLoops<T>& loops_ = AcousticLoopsHere<T>();
  Setting setting_;
  Extent extent_;
  Inner inner_;
  Spacing<T> spacing_;
  std::vector<T> damping0_, damping1_;  // [i + 1] is that of own node i
  Layer layer0_, layer1_;
  Field<T> u_, other_;  // other_: u one step before, and then u one step later
  Field<T> k_, phi_, psi_, gradient_;
  Border<T> border_, k_border_;
};

}  // namespace

template <class T>
std::unique_ptr<Physics<T>> MakeAcoustic(const Setting& setting) {
  return std::make_unique<Acoustic<T>>(setting);
}

template std::unique_ptr<Physics<float>> MakeAcoustic(const Setting&);
template std::unique_ptr<Physics<double>> MakeAcoustic(const Setting&);

}  // namespace gradred::pde
