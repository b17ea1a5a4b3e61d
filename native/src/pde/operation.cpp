#include "pde/operation.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

namespace gradred::pde {
namespace {

class ChannelMessages final : public Messages {
 public:
  explicit ChannelMessages(diff::Channel* channel) : channel_(channel) {}
  void Send(int peer, const void* data, int64_t nbytes) override {
    channel_->Send(peer, data, nbytes);
  }
  void Recv(int peer, void* data, int64_t nbytes) override { channel_->Recv(peer, data, nbytes); }
  void WaitForMessages() override { channel_->WaitForMessages(); }
  void* Scratch(int64_t nbytes) override { return channel_->Scratch(nbytes); }

 private:
  diff::Channel* const channel_;
};

std::string ToText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

std::string ToText(const std::vector<Node>& nodes) {
  std::string text;
  for (const Node& node : nodes) {
    text += (text.empty() ? "" : " ") + std::to_string(node[0]) + "," + std::to_string(node[1]);
  }
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

// A time loop of either dtype, with untyped tensors.
class Loop {
 public:
  Loop(DType dtype, Setting setting, Programme programme)
      : dtype_(dtype), setting_(std::move(setting)), programme_(std::move(programme)) {}
  virtual ~Loop() = default;

  // What a propagation is asked for, equal on all ranks. Throws kInvalidArgument for tensors that
  // do not fit, or a coefficient that the scheme is not stable for.
  std::string Check(const diff::Inputs& inputs) const {
    const std::string what = Name();
    CheckTensor(inputs.at(0), "the coefficient",
                {setting_.block.count[0], setting_.block.count[1]});
    CheckTensor(inputs.at(1), "the signals", {programme_.steps, Count(programme_.sources)});
    if (inputs.size() > 2) CheckTensor(inputs[2], "the cotangents", records_shape());
    const double courant = Courant(inputs[0].data);
    if (std::isinf(courant)) {
      throw Error(Kind::kInvalidArgument, what + ": the coefficient must be positive and finite");
    }
    if (courant > 1) {
      throw Error(Kind::kInvalidArgument,
                  what + ": time steps of " + ToText(setting_.dt) +
                      " are unstable: the Courant number is " + ToText(courant) +
                      ", expected at most 1, so steps of at most " + ToText(setting_.dt / courant));
    }
    return what + " on " + std::to_string(setting_.block.global[0]) + " x " +
           std::to_string(setting_.block.global[1]) + " nodes of " + ToText(setting_.spacing[0]) +
           " x " + ToText(setting_.spacing[1]) + ", " + std::to_string(programme_.steps) +
           " steps of " + ToText(setting_.dt) + ", layer " + std::to_string(setting_.layer) +
           ", sources at " + ToText(programme_.sources) + ", receivers at " +
           ToText(programme_.receivers) + ", " + DTypeName(dtype_) + ", memory " +
           std::to_string(programme_.memory_nbytes);
  }

  diff::Dims records_shape() const { return {programme_.steps, Count(programme_.receivers)}; }

  virtual double Courant(const void* coefficient) const = 0;
  virtual int64_t Run(Messages* messages, const diff::Inputs& inputs, void* records, bool keep) = 0;
  virtual void Gradient(Messages* messages, const diff::Inputs& inputs, int64_t ticket,
                        void* coefficient_gradient, void* signal_gradients) = 0;
  virtual Traffic traffic() const = 0;
  virtual Keeping keeping() const = 0;

 private:
  static int64_t Count(const std::vector<Node>& nodes) { return nodes.size(); }
  std::string Name() const {
    return setting_.equation == Equation::kHeat ? "heat conduction" : "acoustic wave";
  }
  void CheckTensor(const diff::Input& input, const char* what, const diff::Dims& shape) const {
    if (input.dtype == dtype_ && input.shape == shape) return;
    throw Error(Kind::kInvalidArgument, Name() + ": " + what + " must be " + DTypeName(dtype_) +
                                            " of shape " + diff::ToText(shape) + ", got " +
                                            DTypeName(input.dtype) + " of shape " +
                                            diff::ToText(input.shape));
  }

  const DType dtype_;
  const Setting setting_;
  const Programme programme_;
};

template <class T>
class TypedLoop final : public Loop {
 public:
  TypedLoop(DType dtype, const Setting& setting, const Programme& programme)
      : Loop(dtype, setting, programme), loop_(setting, programme) {}

  double Courant(const void* coefficient) const override {
    return loop_.Courant(static_cast<const T*>(coefficient));
  }
  int64_t Run(Messages* messages, const diff::Inputs& inputs, void* records, bool keep) override {
    return loop_.Run(messages, Data(inputs, 0), Data(inputs, 1), static_cast<T*>(records), keep);
  }
  void Gradient(Messages* messages, const diff::Inputs& inputs, int64_t ticket,
                void* coefficient_gradient, void* signal_gradients) override {
    loop_.Gradient(messages, Data(inputs, 0), Data(inputs, 1), Data(inputs, 2), ticket,
                   static_cast<T*>(coefficient_gradient), static_cast<T*>(signal_gradients));
  }
  Traffic traffic() const override { return loop_.traffic(); }
  Keeping keeping() const override { return loop_.keeping(); }

 private:
  static const T* Data(const diff::Inputs& inputs, size_t index) {
    return static_cast<const T*>(inputs.at(index).data);
  }
  TimeLoop<T> loop_;
};

struct Loops {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Loop>> by_id;
  int last = 0;
};
Loops& TheLoops() {
  static auto* loops = new Loops;
  return *loops;
}

std::shared_ptr<Loop> FindLoop(int id) {
  Loops& loops = TheLoops();
  std::lock_guard<std::mutex> lock(loops.mutex);
  const auto at = loops.by_id.find(id);
  if (at == loops.by_id.end()) {
    throw Error(Kind::kNotInitialized,
                "the problem of this propagation is closed or was collected: keep it as long as "
                "functions that use it");
  }
  return at->second;
}

class Propagate final : public diff::Operation {
 public:
  explicit Propagate(const diff::Params& params)
      : id_(static_cast<int>(params.at(0))), keep_(params.at(1) != 0) {}
  // Always agreed on: one rank's coefficient may be too large for the time step.
  bool needs_numbers() const override { return true; }
  diff::Terms TermsOf(const diff::Inputs& inputs, const diff::Channel&) const override {
    loop_ = FindLoop(id_);
    // Who keeps nothing runs the steps again for a gradient, which is collective.
    return {loop_->Check(inputs) + (keep_ ? ", steps kept" : ", steps not kept"), {}};
  }
  void Run(diff::Call& call, diff::Channel& channel, const diff::Numbers&) override {
    const auto loop = std::move(loop_);
    ChannelMessages messages(&channel);
    void* const records = call.Output(0, loop->records_shape());
    auto* const ticket = static_cast<int64_t*>(call.Output(1, {}));
    *ticket = loop->Run(&messages, call.inputs(), records, keep_);
  }

 private:
  const int id_;
  const bool keep_;
  mutable std::shared_ptr<Loop> loop_;  // from what was agreed until it has run
};

class PropagateAdjoint final : public diff::Operation {
 public:
  explicit PropagateAdjoint(const diff::Params& params) : id_(static_cast<int>(params.at(0))) {}
  diff::Terms TermsOf(const diff::Inputs& inputs, const diff::Channel&) const override {
    loop_ = FindLoop(id_);
    return {"the adjoint of " + loop_->Check(inputs), {}};
  }
  void Run(diff::Call& call, diff::Channel& channel, const diff::Numbers&) override {
    const auto loop = std::move(loop_);
    ChannelMessages messages(&channel);
    const diff::Inputs& inputs = call.inputs();
    const int64_t ticket = inputs.at(3).Int64s().at(0);
    void* const coefficient = call.Output(0, inputs[0].shape);
    void* const signals = call.Output(1, inputs[1].shape);
    loop->Gradient(&messages, inputs, ticket, coefficient, signals);
  }

 private:
  const int id_;
  mutable std::shared_ptr<Loop> loop_;  // from what was agreed until it has run
};

}  // namespace

int OpenLoop(DType dtype, const Setting& setting, const Programme& programme) {
  std::shared_ptr<Loop> loop;
  if (dtype == DType::kFloat32) {
    loop = std::make_shared<TypedLoop<float>>(dtype, setting, programme);
  } else if (dtype == DType::kFloat64) {
    loop = std::make_shared<TypedLoop<double>>(dtype, setting, programme);
  } else {
    throw Error(Kind::kInvalidArgument,
                std::string("propagations are of float32 or float64, got ") + DTypeName(dtype));
  }
  Loops& loops = TheLoops();
  std::lock_guard<std::mutex> lock(loops.mutex);
  loops.by_id[++loops.last] = std::move(loop);
  return loops.last;
}

void CloseLoop(int id) {
  Loops& loops = TheLoops();
  std::shared_ptr<Loop> loop;  // freed when the lock is let go
  std::lock_guard<std::mutex> lock(loops.mutex);
  const auto at = loops.by_id.find(id);
  if (at == loops.by_id.end()) return;
  loop = std::move(at->second);
  loops.by_id.erase(at);
}

Traffic TrafficOf(int id) { return FindLoop(id)->traffic(); }
Keeping KeepingOf(int id) { return FindLoop(id)->keeping(); }

const std::map<std::string, diff::MakeOperation>& Operations() {
  static const auto* operations = new std::map<std::string, diff::MakeOperation>{
      {"propagate",
       [](const diff::Params& params) -> std::unique_ptr<diff::Operation> {
         return std::make_unique<Propagate>(params);
       }},
      {"propagate_adjoint",
       [](const diff::Params& params) -> std::unique_ptr<diff::Operation> {
         return std::make_unique<PropagateAdjoint>(params);
       }},
  };
  return *operations;
}

}  // namespace gradred::pde
