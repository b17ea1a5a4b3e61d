// Who steps a loop: what a caller leaves behind when it lets go of it, the loop's thread does soon.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "comm/loopback/hub.h"
#include "engine/loop.h"
#include "faulty_transport.h"
#include "testing.h"

using namespace gradred;

namespace {

constexpr Nanos kSoon = engine::kLongestSleep / 2;  // not by the thread's longest sleep

// Does one item a step, in which an item needs no message: nothing rings when the next is possible.
class Items final : public engine::Loop {
 public:
  explicit Items(comm::Transport& transport)
      : Loop(transport, std::make_shared<engine::Completions>()), thread_([this] {
          Drive();
          ended_ = true;
        }) {}
  ~Items() override {
    Stop();
    thread_.join();
  }
  void Stop() {
    stopping_ = true;
    Demand();
  }
  bool ended() const { return ended_; }
  void Add(int items) {
    brought_ += items;
    SetInboxFull(true);
  }
  void AwaitForEver() { awaits_ = true; }
  // What a step sets as the loop's next time to wake.
  void PlanWake(Nanos when) { planned_ = when; }
  int done() const { return done_; }
  int steps_of_thread() const { return steps_of_thread_; }
  bool WaitFor(const std::function<bool()>& what) const {
    for (const Nanos start = Now(); Now() - start < kSoon; std::this_thread::yield())
      if (what()) return true;
    return what();
  }

 private:
  bool Step() override {
    if (std::this_thread::get_id() == thread_.get_id()) ++steps_of_thread_;
    SetInboxFull(false);
    left_ += brought_.exchange(0);
    wake_ = planned_.exchange(kForever);
    if (left_ == 0) return false;
    --left_;
    ++done_;
    return true;
  }
  bool AwaitsMessages() const override { return awaits_ || left_ > 0; }
  Nanos NextWake() const override { return wake_; }
  bool Ended() override { return stopping_; }

  std::atomic<bool> stopping_{false}, ended_{false}, awaits_{false};
  std::atomic<int> brought_{0}, done_{0}, steps_of_thread_{0};
  std::atomic<Nanos> planned_{kForever};
  int left_ = 0;
  Nanos wake_ = kForever;
  std::thread thread_;
};

// Counts how often it is asked while nobody has the loop.
class Watched final : public testing::FaultyTransport {
 public:
  explicit Watched(comm::Transport& inner) : FaultyTransport(inner, {}) {}
  bool MustPoll() const override {
    if (engine::Loop* const watched = loop.load()) {
      const engine::Loop::Session session(watched);
      if (session) ++unguarded;
      ++asked;
    }
    return true;
  }
  std::atomic<engine::Loop*> loop{nullptr};
  mutable std::atomic<int> asked{0}, unguarded{0};
};

struct World {
  std::shared_ptr<comm::LoopbackHub> hub = std::make_shared<comm::LoopbackHub>(1);
  std::unique_ptr<comm::Transport> transport = hub->MakeTransport(0);
  Items loop{*transport};
  World() {
    CHECK(loop.WaitFor([this] { return loop.steps_of_thread() > 0; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the thread sleeps
  }
};

}  // namespace

TEST(TheThreadGoesOnWithWhatACallersLastStepMadePossible) {
  World world;
  engine::Loop::Session session(&world.loop);
  CHECK(static_cast<bool>(session));
  world.loop.Add(3);
  CHECK(session.Step());
  CHECK(session.AwaitsMessages());
  session.Release();
  CHECK(world.loop.WaitFor([&] { return world.loop.done() == 3; }));
}

TEST(AThreadThatFoundTheLoopTakenWakesInTime) {
  World world;
  const int before = world.loop.steps_of_thread();
  world.loop.PlanWake(Now() + 20 * kMillisecond);
  world.loop.Call();
  CHECK(world.loop.WaitFor([&] { return world.loop.steps_of_thread() > before; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  engine::Loop::Session session(&world.loop);
  CHECK(static_cast<bool>(session));
  const int planned = world.loop.steps_of_thread();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // its time has passed
  world.loop.PlanWake(Now() + 20 * kMillisecond);
  CHECK(!session.Step());
  session.Release();
  CHECK(world.loop.WaitFor([&] { return world.loop.steps_of_thread() > planned; }));
}

TEST(WhatIsBroughtWhileACallerHasTheLoopIsDone) {
  World world;
  engine::Loop::Session session(&world.loop);
  CHECK(static_cast<bool>(session));
  CHECK(!session.Step());
  world.loop.Add(2);
  session.Release();
  CHECK(world.loop.WaitFor([&] { return world.loop.done() == 2; }));
}

TEST(ALoopThatIsStoppedWhileACallerHasItEndsSoon) {
  World world;
  {
    engine::Loop::Session session(&world.loop);
    CHECK(static_cast<bool>(session));
    world.loop.Stop();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the thread finds it taken
  }
  CHECK(world.loop.WaitFor([&] { return world.loop.ended(); }));
}

TEST(TheTransportIsAskedByWhoHasTheLoopOnly) {
  const auto hub = std::make_shared<comm::LoopbackHub>(1);
  const auto inner = hub->MakeTransport(0);
  Watched transport(*inner);
  Items loop(transport);
  loop.AwaitForEver();
  transport.loop = &loop;
  loop.Call();
  CHECK(loop.WaitFor([&] { return transport.asked > 3; }));
  transport.loop = nullptr;
  CHECK_EQ(transport.unguarded.load(), 0);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
