// The propagators on ranks as threads: adjoints, checkpoints, and equality with one rank.
#include <cmath>
#include <random>

#include "comm/loopback/hub.h"
#include "pde/time_loop.h"
#include "ranks.h"

using namespace gradred;
using pde::Equation;

namespace {

struct Case {
  Equation equation = Equation::kAcoustic;
  std::array<int64_t, 2> global{23, 31};
  std::array<int, 2> ranks{1, 1};
  int64_t layer = 5;
  int64_t steps = 40;
  int64_t memory_nbytes = int64_t{1} << 30;
  int threads = 1;
};

// What all ranks together give, on the whole grid.
template <class T>
struct Result {
  std::vector<T> records, coefficient_gradient, signal_gradients;
  std::vector<pde::Traffic> traffic;
  pde::Keeping keeping;
};

const std::vector<pde::Node> kSources = {{9, 11}, {3, 28}}, kReceivers = {{9, 12}, {20, 4}, {0, 0}};

template <class T>
std::vector<T> Random(int64_t n, unsigned seed, double low, double high) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> values(low, high);
  std::vector<T> result(n);
  for (T& value : result) value = static_cast<T>(values(generator));
  return result;
}

template <class T>
std::vector<T> Coefficient(const Case& c) {
  return Random<T>(c.global[0] * c.global[1], 7, 0.6, 1.4);
}

pde::Setting SettingOf(const Case& c, int rank) {
  pde::Setting setting;
  setting.equation = c.equation;
  const std::array<int, 2> at{rank / c.ranks[1], rank % c.ranks[1]};
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t n = c.global[axis];
    const int parts = c.ranks[axis];
    setting.block.global[axis] = n;
    setting.block.begin[axis] = pde::PartBegin(n, parts, at[axis]);
    setting.block.count[axis] = pde::PartBegin(n, parts, at[axis] + 1) - setting.block.begin[axis];
    setting.largest_block[axis] = (n + parts - 1) / parts;
    const int distance = axis == 0 ? c.ranks[1] : 1;
    if (at[axis] > 0) setting.block.neighbours[2 * axis] = rank - distance;
    if (at[axis] + 1 < parts) setting.block.neighbours[2 * axis + 1] = rank + distance;
  }
  setting.spacing = {1.0, 1.25};
  setting.dt = c.equation == Equation::kAcoustic ? 0.5 : 0.1;
  setting.layer = c.equation == Equation::kAcoustic ? c.layer : 0;
  setting.layer_speed = 1;
  setting.threads = c.threads;
  return setting;
}

class LoopbackMessages final : public pde::Messages {
 public:
  explicit LoopbackMessages(comm::Transport* transport) : transport_(transport) {}
  void Send(int peer, const void* data, int64_t nbytes) override {
    works_.push_back(transport_->Send(peer, {3, 0}, data, nbytes));
  }
  void Recv(int peer, void* data, int64_t nbytes) override {
    works_.push_back(transport_->Recv(peer, {3, 0}, data, nbytes));
  }
  void WaitForMessages() override {
    for (const comm::WorkPtr& work : works_) {
      ThrowIfError(comm::Wait(*work, *transport_, 30 * kSecond, "a message"));
    }
    works_.clear();
  }
  void* Scratch(int64_t nbytes) override {
    memory_.emplace_back(nbytes);
    return memory_.back().data();
  }

 private:
  comm::Transport* transport_;
  std::vector<comm::WorkPtr> works_;
  std::vector<std::vector<char>> memory_;
};

template <class T, class Move>
void ForBlock(const pde::Block& block, std::vector<T>* whole, std::vector<T>* own, Move move) {
  for (int64_t i = 0; i < block.count[0]; ++i) {
    for (int64_t j = 0; j < block.count[1]; ++j) {
      move((*whole)[(block.begin[0] + i) * block.global[1] + block.begin[1] + j],
           (*own)[i * block.count[1] + j]);
    }
  }
}

template <class T>
Result<T> Propagate(const Case& c, std::vector<T> coefficient, const std::vector<T>& signals,
                    const std::vector<T>& cotangents) {
  const int size = c.ranks[0] * c.ranks[1];
  Result<T> result;
  result.records.resize(cotangents.size());
  result.signal_gradients.resize(signals.size());
  result.coefficient_gradient.resize(coefficient.size());
  result.traffic.resize(size);
  std::vector<Result<T>> parts(size);
  const auto hub = std::make_shared<comm::LoopbackHub>(size);
  testing::RunRanks(size, [&](int rank) {
    const auto transport = hub->MakeTransport(rank);
    const pde::Setting setting = SettingOf(c, rank);
    const pde::Programme programme{c.steps, kSources, kReceivers, c.memory_nbytes};
    pde::TimeLoop<T> loop(setting, programme);
    LoopbackMessages messages(transport.get());
    Result<T>& part = parts[rank];
    part.records.resize(cotangents.size());
    part.signal_gradients.resize(signals.size());
    part.coefficient_gradient.resize(setting.block.count[0] * setting.block.count[1]);
    std::vector<T> own(part.coefficient_gradient.size());
    ForBlock(setting.block, &coefficient, &own, [](T& whole, T& own_value) { own_value = whole; });
    CHECK(loop.Courant(own.data()) <= 1);
    const int64_t ticket =
        loop.Run(&messages, own.data(), signals.data(), part.records.data(), true);
    part.traffic.push_back(loop.traffic());
    for (int repeat = 0; repeat < 2; ++repeat) {
      loop.Gradient(&messages, own.data(), signals.data(), cotangents.data(), ticket + repeat * 100,
                    part.coefficient_gradient.data(), part.signal_gradients.data());
    }
    part.keeping = loop.keeping();
  });
  for (int rank = 0; rank < size; ++rank) {
    ForBlock(SettingOf(c, rank).block, &result.coefficient_gradient,
             &parts[rank].coefficient_gradient, [](T& whole, T& own) { whole = own; });
    for (size_t i = 0; i < result.records.size(); ++i) result.records[i] += parts[rank].records[i];
    for (size_t i = 0; i < result.signal_gradients.size(); ++i) {
      result.signal_gradients[i] += parts[rank].signal_gradients[i];
    }
    result.traffic[rank] = parts[rank].traffic[0];
    result.keeping = parts[rank].keeping;
  }
  return result;
}

template <class T>
Result<T> Propagate(const Case& c) {
  return Propagate(c, Coefficient<T>(c), Random<T>(c.steps * kSources.size(), 1, -1, 1),
                   Random<T>(c.steps * kReceivers.size(), 2, -1, 1));
}

template <class T>
double Dot(const std::vector<T>& a, const std::vector<T>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// The equations of Note [Acoustic step] and Note [Heat step] again, node by node.
struct Direct {
  explicit Direct(const Case& c)
      : c(c),
        setting(SettingOf(c, 0)),
        u(n()),
        before(n()),
        phi(n()),
        psi(n()),
        m(Coefficient<double>(c)) {}
  int64_t n() const { return c.global[0] * c.global[1]; }
  bool In(int64_t i, int64_t j) const {
    return i >= 0 && j >= 0 && i < c.global[0] && j < c.global[1];
  }
  double At(const std::vector<double>& f, int64_t i, int64_t j) const {
    return In(i, j) ? f[i * c.global[1] + j] : 0;
  }
  double DampingAt(int axis, int64_t node) const {
    if (setting.layer == 0) return 0;
    const double depth = std::max<double>(
        {double(setting.layer - node), double(node - (c.global[axis] - 1 - setting.layer)), 0});
    const double part = depth / setting.layer;
    return -1.5 * std::log(1e-4) / (setting.layer * setting.spacing[axis]) * part * part;
  }
  void Step(const double* signals) {
    const double dt = setting.dt, h0 = setting.spacing[0], h1 = setting.spacing[1];
    std::vector<double> u2(n()), phi2(n()), psi2(n());
    for (int64_t i = 0; i < c.global[0]; ++i) {
      for (int64_t j = 0; j < c.global[1]; ++j) {
        const int64_t at = i * c.global[1] + j;
        if (c.equation == Equation::kHeat) {
          double change = 0;
          for (const auto& [di, dj] : {std::pair{-1, 0}, {1, 0}, {0, -1}, {0, 1}}) {
            const double beyond = In(i + di, j + dj) ? At(m, i + di, j + dj) : m[at];
            const double h = di != 0 ? h0 : h1;
            change += (m[at] + beyond) / 2 * (At(u, i + di, j + dj) - u[at]) / (h * h);
          }
          u2[at] = u[at] + dt * change;
          continue;
        }
        const double s = DampingAt(0, i), r = DampingAt(1, j), a = 1 / (1 + (s + r) * dt / 2);
        const double d0u = (At(u, i + 1, j) - At(u, i - 1, j)) / (2 * h0);
        const double d1u = (At(u, i, j + 1) - At(u, i, j - 1)) / (2 * h1);
        const double sum = (At(u, i + 1, j) - 2 * u[at] + At(u, i - 1, j)) / (h0 * h0) +
                           (At(u, i, j + 1) - 2 * u[at] + At(u, i, j - 1)) / (h1 * h1) +
                           (At(phi, i + 1, j) - At(phi, i - 1, j)) / (2 * h0) +
                           (At(psi, i, j + 1) - At(psi, i, j - 1)) / (2 * h1);
        u2[at] = a * ((2 - s * r * dt * dt) * u[at] - (1 - (s + r) * dt / 2) * before[at] +
                      dt * dt * m[at] * sum);
        phi2[at] = (1 - s * dt) * phi[at] + dt * (r - s) * d0u;
        psi2[at] = (1 - r * dt) * psi[at] + dt * (s - r) * d1u;
      }
    }
    before = u;
    u = u2;
    phi = phi2;
    psi = psi2;
    for (size_t s = 0; s < kSources.size(); ++s) {
      const auto [i, j] = kSources[s];
      const double weight = c.equation == Equation::kHeat
                                ? dt
                                : dt * dt / (1 + (DampingAt(0, i) + DampingAt(1, j)) * dt / 2);
      u[i * c.global[1] + j] += weight * signals[s];
    }
  }
  Case c;
  pde::Setting setting;
  std::vector<double> u, before, phi, psi, m;
};

}  // namespace

TEST(RecordsAreTheSchemes) {
  for (const Equation equation : {Equation::kAcoustic, Equation::kHeat}) {
    for (const int64_t layer : {0, 5}) {
      Case c;
      c.equation = equation;
      c.layer = layer;
      c.ranks = {2, 2};
      const auto signals = Random<double>(c.steps * kSources.size(), 1, -1, 1);
      const Result<double> result = Propagate<double>(c);
      Direct direct(c);
      for (int64_t step = 0; step < c.steps; ++step) {
        direct.Step(signals.data() + step * kSources.size());
        for (size_t r = 0; r < kReceivers.size(); ++r) {
          const double expected = direct.At(direct.u, kReceivers[r][0], kReceivers[r][1]);
          const double got = result.records[step * kReceivers.size() + r];
          // Rounding of some hundred operations on values of order one.
          CHECK(std::abs(got - expected) <= 1e-13 * std::max(1.0, std::abs(expected)));
        }
      }
    }
  }
}

// <records(signals), y> = <signals, signal_gradients(y)>: the records are linear in the signals.
TEST(AdjointOfSignals) {
  for (const Equation equation : {Equation::kAcoustic, Equation::kHeat}) {
    for (const std::array<int, 2> ranks :
         {std::array{1, 1}, {2, 1}, {1, 2}, {2, 2}, {3, 1}, {1, 5}, {23, 1}}) {
      Case c;
      c.equation = equation;
      c.ranks = ranks;
      const auto signals = Random<double>(c.steps * kSources.size(), 1, -1, 1);
      const auto cotangents = Random<double>(c.steps * kReceivers.size(), 2, -1, 1);
      const Result<double> result = Propagate<double>(c);
      const double forward = Dot(result.records, cotangents);
      const double backward = Dot(signals, result.signal_gradients);
      CHECK(std::abs(forward - backward) <= 1e-12 * std::abs(forward));
    }
  }
}

TEST(GradientOfCoefficientIsTheDifferenceQuotient) {
  for (const Equation equation : {Equation::kAcoustic, Equation::kHeat}) {
    Case c;
    c.equation = equation;
    c.ranks = {2, 2};
    const auto signals = Random<double>(c.steps * kSources.size(), 1, -1, 1);
    const auto cotangents = Random<double>(c.steps * kReceivers.size(), 2, -1, 1);
    const Result<double> result = Propagate<double>(c);
    const auto direction = Random<double>(c.global[0] * c.global[1], 5, -1, 1);
    const double slope = Dot(result.coefficient_gradient, direction);
    // Central differences: the error falls with the square of the step.
    double previous = 0;
    for (const double step : {1e-2, 5e-3, 2.5e-3}) {
      double values[2];
      for (const int sign : {0, 1}) {
        auto moved = Coefficient<double>(c);
        for (size_t i = 0; i < moved.size(); ++i) moved[i] += (sign ? step : -step) * direction[i];
        values[sign] = Dot(Propagate(c, moved, signals, cotangents).records, cotangents);
      }
      const double error = std::abs((values[1] - values[0]) / (2 * step) - slope);
      CHECK(error <= 0.02 * std::abs(slope));
      if (previous > 0) CHECK(previous / error > 3.5 && previous / error < 4.5);
      previous = error;
    }
  }
}

template <class T>
void CheckSameBits(const Case& one, const Case& other) {
  const Result<T> a = Propagate<T>(one), b = Propagate<T>(other);
  CHECK(a.records == b.records);
  CHECK(a.signal_gradients == b.signal_gradients);
  CHECK(a.coefficient_gradient == b.coefficient_gradient);
}

TEST(AnyGridOfRanksGivesTheBitsOfOne) {
  for (const Equation equation : {Equation::kAcoustic, Equation::kHeat}) {
    for (const std::array<int, 2> ranks :
         {std::array{2, 1}, {1, 2}, {2, 2}, {3, 2}, {23, 1}, {1, 31}}) {
      Case one, many;
      one.equation = many.equation = equation;
      many.ranks = ranks;
      CheckSameBits<double>(one, many);
      CheckSameBits<float>(one, many);
    }
  }
}

TEST(CheckpointsAndThreadsGiveTheSameBits) {
  for (const Equation equation : {Equation::kAcoustic, Equation::kHeat}) {
    Case one, tight;
    one.equation = tight.equation = equation;
    one.steps = tight.steps = 80;
    tight.ranks = {2, 1};
    tight.threads = 3;
    tight.memory_nbytes = equation == Equation::kAcoustic ? 140000 : 100000;
    CHECK(Propagate<double>(tight).keeping.checkpoints > 1);
    CHECK_EQ(Propagate<double>(one).keeping.checkpoints, 0);
    CheckSameBits<double>(one, tight);
  }
}

TEST(OneMessageANeighbourAndStep) {
  Case c;
  c.ranks = {3, 2};
  const Result<double> result = Propagate<double>(c);
  CHECK_EQ(result.traffic[0].messages, 2 * c.steps);
  CHECK_EQ(result.traffic[2].messages, 3 * c.steps);
}

TEST(BadInputIsRefused) {
  CHECK_ERROR(pde::DecideKeeping(100, 1000, 4000, 20000), Kind::kInvalidArgument,
              "checkpoints every");
  CHECK_ERROR(pde::DecideKeeping(0, 1, 1, 1), Kind::kInvalidArgument, "steps");
  CHECK_EQ(pde::DecideKeeping(100, 1000, 4000, 100000).segment, 100);
  CHECK(pde::DecideKeeping(100, 1000, 4000, 50000).nbytes <= 50000);
  // Ten steps at a time: nine checkpoints, and the adjoint state beside the tenth segment.
  const pde::Keeping ten = pde::DecideKeeping(100, 1000, 1000, 20000);
  CHECK_EQ(ten.segment, 10);
  CHECK_EQ(ten.nbytes, 10 * 1000 + 9 * 1000 + 1000);
  const Case c;
  const pde::Programme outside{4, {{23, 0}}, {}, 1 << 30};
  CHECK_ERROR(pde::TimeLoop<double>(SettingOf(c, 0), outside), Kind::kInvalidArgument,
              "source 0 is at node (23, 0)");
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
