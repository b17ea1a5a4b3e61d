// The process's engine and the specs of traced graphs.
#include <unistd.h>

#include <mutex>
#include <unordered_map>

#include "base/forks.h"
#include "engine/engine.h"

namespace gradred::engine {
namespace {

struct State {
  std::mutex mutex;
  std::shared_ptr<Engine> engine;
  pid_t pid = 0;  // that has set it; 0: none
  int forks = 0;
  std::unordered_map<std::string, DomainSpecPtr> specs;
};
State& TheState() {
  static State* state = new State;  // outlives every thread
  return *state;
}

}  // namespace

void SetGlobal(std::shared_ptr<Engine> engine) {
  std::shared_ptr<Engine> old;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(TheState().mutex);
  old = std::move(TheState().engine);
  TheState().engine = std::move(engine);
  TheState().pid = getpid();
  TheState().forks = Forks();
}

std::shared_ptr<Engine> GlobalOrNull() {
  if (TheState().forks != Forks()) return nullptr;
  std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().engine;
}

std::shared_ptr<Engine> Global() {
  if (TheState().pid != 0 && TheState().forks != Forks())
    throw Error(Kind::kNotInitialized,
                "this process was forked from one that uses gradred; the engine stays with the "
                "parent (pid " +
                    std::to_string(TheState().pid) + ")");
  std::shared_ptr<Engine> engine = GlobalOrNull();
  if (!engine) throw Error(Kind::kNotInitialized, "call gradred.init() first");
  return engine;
}

void RegisterSpec(DomainSpecPtr spec) {
  const std::string name = spec->name;
  RegisterSpec(name, std::move(spec));
}

void RegisterSpec(const std::string& key, DomainSpecPtr spec) {
  std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().specs[key] = std::move(spec);
}

DomainSpecPtr FindSpec(const std::string& name) {
  std::lock_guard<std::mutex> lock(TheState().mutex);
  const auto at = TheState().specs.find(name);
  return at == TheState().specs.end() ? nullptr : at->second;
}

void ForgetSpec(const std::string& name) {
  std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().specs.erase(name);
}

}  // namespace gradred::engine
