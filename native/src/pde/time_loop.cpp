#include "pde/time_loop.h"

#include <algorithm>
#include <string>

#include "base/status.h"

namespace gradred::pde {

Keeping DecideKeeping(int64_t steps, int64_t saved_nbytes, int64_t state_nbytes,
                      int64_t memory_nbytes) {
  if (steps < 1) {
    throw Error(Kind::kInvalidArgument, "steps must be at least 1, got " + std::to_string(steps));
  }
  Keeping best;
  for (int64_t segment = steps; segment >= 1; --segment) {
    const int64_t segments = (steps + segment - 1) / segment;
    const Keeping keeping{segment, segments - 1,
                          // Checkpoints, and the adjoint state while a segment is computed again.
                          segment * saved_nbytes + (segments > 1 ? segments : 0) * state_nbytes};
    if (keeping.nbytes <= memory_nbytes) return keeping;
    if (best.segment == 0 || keeping.nbytes < best.nbytes) best = keeping;
  }
  throw Error(Kind::kInvalidArgument,
              "the gradient of " + std::to_string(steps) + " steps needs at least " +
                  std::to_string(best.nbytes) + " bytes a rank (checkpoints every " +
                  std::to_string(best.segment) + " steps), memory_nbytes is " +
                  std::to_string(memory_nbytes));
}

template <class T>
TimeLoop<T>::TimeLoop(const Setting& setting, const Programme& programme)
    : block_(setting.block),
      programme_(programme),
      physics_(setting.equation == Equation::kAcoustic ? MakeAcoustic<T>(setting)
                                                       : MakeHeat<T>(setting)),
      sources_(OwnPlaces(programme.sources, "source")),
      receivers_(OwnPlaces(programme.receivers, "receiver")) {
  const Extent largest(setting.largest_block, sizeof(T));
  const int64_t nbytes = sizeof(T);
  keeping_ =
      DecideKeeping(programme.steps, physics_->saved_values(largest) * nbytes,
                    physics_->state().size() * largest.values() * nbytes, programme.memory_nbytes);
  checkpoints_.resize(keeping_.checkpoints);
}

template <class T>
std::vector<typename TimeLoop<T>::Place> TimeLoop<T>::OwnPlaces(const std::vector<Node>& nodes,
                                                                const char* what) const {
  std::vector<Place> places;
  for (size_t index = 0; index < nodes.size(); ++index) {
    const auto [i, j] = nodes[index];
    if (i < 0 || i >= block_.global[0] || j < 0 || j >= block_.global[1]) {
      throw Error(Kind::kInvalidArgument, std::string(what) + " " + std::to_string(index) +
                                              " is at node (" + std::to_string(i) + ", " +
                                              std::to_string(j) + "), the grid has " +
                                              std::to_string(block_.global[0]) + " x " +
                                              std::to_string(block_.global[1]) + " nodes");
    }
    if (!block_.Contains(i, j)) continue;
    const int64_t row = i - block_.begin[0], column = j - block_.begin[1];
    places.push_back({physics_->extent().At(row, column), static_cast<int64_t>(index),
                      physics_->SourceWeight(row, column)});
  }
  return places;
}

template <class T>
void TimeLoop<T>::RunSegment(int64_t segment, const T* signals, T* saved, T* records) {
  const int64_t sources = programme_.sources.size(), receivers = programme_.receivers.size();
  for (int64_t step = FirstOf(segment); step < EndOf(segment); ++step) {
    physics_->Step(saved == nullptr ? nullptr : SavedOf(step));
    T* const u = physics_->u();
    for (const Place& s : sources_) u[s.offset] += s.weight * signals[step * sources + s.index];
    if (records == nullptr) continue;
    for (const Place& r : receivers_) records[step * receivers + r.index] = u[r.offset];
  }
}

template <class T>
T* TimeLoop<T>::SavedOf(int64_t step) {
  const int64_t values = physics_->saved_values(physics_->extent());
  if (saved_ == nullptr) saved_.reset(new T[values * keeping_.segment]);
  return saved_.get() + (step % keeping_.segment) * values;
}

template <class T>
int64_t TimeLoop<T>::Run(Messages* messages, const T* coefficient, const T* signals, T* records,
                         bool keep) {
  std::fill_n(records, programme_.steps * programme_.receivers.size(), T{0});
  kept_ = 0;
  held_ = -1;
  physics_->Attach(messages);
  physics_->Begin(coefficient);
  for (int64_t segment = 0; segment <= keeping_.checkpoints; ++segment) {
    if (keep && segment > 0) Save(&checkpoints_[segment - 1]);
    const bool last = segment == keeping_.checkpoints;
    RunSegment(segment, signals, keep && last ? SavedOf(0) : nullptr, records);
  }
  ++ticket_;
  if (keep) {
    kept_ = ticket_;
    held_ = keeping_.checkpoints;
  }
  return ticket_;
}

// Puts the segment's steps into saved_; the cotangents in the fields stay.
template <class T>
void TimeLoop<T>::Hold(int64_t segment, const T* coefficient, const T* signals) {
  if (held_ == segment) return;
  Save(&adjoint_);
  if (segment == 0)
    physics_->Begin(coefficient);
  else
    Load(checkpoints_[segment - 1]);
  RunSegment(segment, signals, SavedOf(0), nullptr);
  held_ = segment;
  Load(adjoint_);
}

template <class T>
void TimeLoop<T>::Gradient(Messages* messages, const T* coefficient, const T* signals,
                           const T* cotangents, int64_t ticket, T* coefficient_gradient,
                           T* signal_gradients) {
  const int64_t sources = programme_.sources.size(), receivers = programme_.receivers.size();
  if (kept_ == 0 || kept_ != ticket) {
    std::vector<T> records(programme_.steps * receivers);
    Run(messages, coefficient, signals, records.data(), true);
  } else {
    physics_->Attach(messages);
  }
  std::fill_n(signal_gradients, programme_.steps * sources, T{0});
  physics_->BeginAdjoint();
  for (int64_t segment = keeping_.checkpoints; segment >= 0; --segment) {
    Hold(segment, coefficient, signals);
    for (int64_t step = EndOf(segment) - 1; step >= FirstOf(segment); --step) {
      T* const y = physics_->u();
      for (const Place& r : receivers_) y[r.offset] += cotangents[step * receivers + r.index];
      for (const Place& s : sources_) {
        signal_gradients[step * sources + s.index] = s.weight * y[s.offset];
      }
      physics_->StepAdjoint(SavedOf(step));
    }
  }
  physics_->EndAdjoint(coefficient_gradient);
}

template <class T>
void TimeLoop<T>::Save(State* state) {
  const std::vector<Field<T>*> fields = physics_->state();
  state->resize(fields.size());
  for (size_t i = 0; i < fields.size(); ++i) {
    (*state)[i].assign(fields[i]->data(), fields[i]->data() + fields[i]->values());
  }
}

template <class T>
void TimeLoop<T>::Load(const State& state) {
  const std::vector<Field<T>*> fields = physics_->state();
  for (size_t i = 0; i < fields.size(); ++i) {
    std::copy(state[i].begin(), state[i].end(), fields[i]->data());
  }
}

template class TimeLoop<float>;
template class TimeLoop<double>;

}  // namespace gradred::pde
