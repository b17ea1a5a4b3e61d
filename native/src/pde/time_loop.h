// All steps of a propagation on a rank, and the gradient of what it recorded.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "pde/physics.h"

namespace gradred::pde {

using Node = std::array<int64_t, 2>;  // of the whole grid

// Equal on all ranks.
struct Programme {
  int64_t steps = 0;
  std::vector<Node> sources, receivers;
  // What a rank may keep between Run and Gradient; more is recomputed from checkpoints.
  int64_t memory_nbytes = int64_t{1} << 31;
};

// How a gradient gets the steps' saved values: all kept, or recomputed, segment by segment, from
// checkpoints. Each step is computed at most twice. Deciding needs the largest block, so that all
// ranks decide alike: recomputation is collective.
struct Keeping {
  int64_t segment = 0;  // steps between checkpoints; all of them: no checkpoint
  int64_t checkpoints = 0;
  int64_t nbytes = 0;
};
// Throws kInvalidArgument when `memory_nbytes` is too little, saying how much is needed.
Keeping DecideKeeping(int64_t steps, int64_t saved_nbytes, int64_t state_nbytes,
                      int64_t memory_nbytes);

// Used by one thread. Run and Gradient are collective.
template <class T>
class TimeLoop {
 public:
  // Throws kInvalidArgument for a node outside the grid and for too little memory.
  TimeLoop(const Setting& setting, const Programme& programme);

  // `coefficient` [rows, columns] of the block; `signals` [steps, sources]: what source s adds to
  // the right-hand side in step n; `records` [steps, receivers]: the field after the step. A
  // receiver's values are on the rank whose block holds it, zeros on the others; so are the
  // cotangents of signals. With `keep`, the steps stay for a Gradient of the same ticket.
  // Returns the ticket.
  int64_t Run(Messages* messages, const T* coefficient, const T* signals, T* records, bool keep);
  // For cotangents [steps, receivers] of the records; cotangents of others' receivers are ignored.
  // Runs again what `ticket` has not kept.
  void Gradient(Messages* messages, const T* coefficient, const T* signals, const T* cotangents,
                int64_t ticket, T* coefficient_gradient, T* signal_gradients);

  double Courant(const T* coefficient) const { return physics_->Courant(coefficient); }
  Traffic traffic() const { return physics_->traffic(); }
  const Keeping& keeping() const { return keeping_; }

 private:
  struct Place {
    int64_t offset;  // in the padded field
    int64_t index;   // among all sources or receivers
    T weight;
  };
  using State = std::vector<std::vector<T>>;
  std::vector<Place> OwnPlaces(const std::vector<Node>& nodes, const char* what) const;
  int64_t FirstOf(int64_t segment) const { return segment * keeping_.segment; }
  int64_t EndOf(int64_t segment) const { return std::min(FirstOf(segment + 1), programme_.steps); }
  // `saved`, `records`: null, or for the steps of the segment, or of all.
  void RunSegment(int64_t segment, const T* signals, T* saved, T* records);
  T* SavedOf(int64_t step);  // of the held segment
  void Hold(int64_t segment, const T* coefficient, const T* signals);
  void Save(State* state);
  void Load(const State& state);

  Block block_;
  Programme programme_;
  std::unique_ptr<Physics<T>> physics_;
  std::vector<Place> sources_, receivers_;
  Keeping keeping_;
  std::unique_ptr<T[]> saved_;      // of one segment, made when first needed
  std::vector<State> checkpoints_;  // before each segment but the first
  State adjoint_;                   // while a segment is recomputed
  int64_t ticket_ = 0;              // of the last Run
  int64_t kept_ = 0;                // the Run whose steps are kept, 0: none
  int64_t held_ = -1;               // the segment in saved_
};

}  // namespace gradred::pde
