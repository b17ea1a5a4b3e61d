// Engines whose ranks are threads of the test, and the calls that tests make of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/loopback/world.h"
#include "engine/engine.h"
#include "testing.h"

namespace testing {

using WrapWorld =
    std::function<std::unique_ptr<gradred::comm::World>(std::unique_ptr<gradred::comm::World>)>;

// Runs `body` on n engines, a thread a rank; the test fails with what the ranks failed with.
inline void OnRanks(int n, const std::function<void(gradred::engine::Engine&, int)>& body,
                    gradred::engine::EngineOptions options = {}, bool shut_down = true,
                    const WrapWorld& wrap = nullptr, gradred::comm::LoopbackOptions loopback = {}) {
  auto worlds = gradred::comm::MakeLoopbackWorlds(n, loopback);
  std::vector<std::thread> threads;
  std::vector<std::string> failures(n);
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      try {
        if (wrap) worlds[r] = wrap(std::move(worlds[r]));
        gradred::engine::Engine engine(std::move(worlds[r]), options);
        body(engine, r);
        if (shut_down) engine.Shutdown("done");
      } catch (const std::exception& e) {
        failures[r] = e.what();
      }
    });
  for (auto& thread : threads) thread.join();
  std::string all;
  for (int r = 0; r < n; ++r)
    if (!failures[r].empty()) all += "rank " + std::to_string(r) + ": " + failures[r] + "\n  ";
  if (!all.empty()) throw Failure(all);
}

inline gradred::engine::EntrySpec Float(
    const std::string& label, int64_t count,
    gradred::reduce::ReduceOp op = gradred::reduce::ReduceOp::kSum) {
  gradred::engine::EntrySpec entry;
  entry.label = label;
  entry.reduce_op = op;
  entry.shape = {count};
  return entry;
}

inline gradred::engine::DomainSpecPtr Spec(const std::string& name,
                                           std::vector<gradred::engine::EntrySpec> entries,
                                           std::vector<int> ends = {}) {
  auto spec = std::make_shared<gradred::engine::DomainSpec>();
  spec->name = name;
  spec->entries = std::move(entries);
  spec->group_ends = std::move(ends);
  return spec;
}

inline gradred::engine::Submission InPlace(std::vector<float>& data) {
  gradred::engine::Submission submission;
  submission.input = submission.output = data.data();
  return submission;
}

inline std::vector<float> Reduce(gradred::engine::Engine& engine, const std::string& name,
                                 std::vector<float> data,
                                 gradred::reduce::ReduceOp op = gradred::reduce::ReduceOp::kSum) {
  std::vector<gradred::engine::Submission> submissions;
  submissions.push_back(InPlace(data));
  engine.RunBlocking(Spec(name, {Float(name, static_cast<int64_t>(data.size()), op)}),
                     std::move(submissions));
  return data;
}

}  // namespace testing
