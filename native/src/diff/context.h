// A group of ranks, and the order of what they communicate.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "diff/operation.h"

namespace gradred::diff {

struct ContextOptions {
  int id = 0;  // the same on all members, used once in a job
  std::string name;
  std::vector<int> members;  // world ranks, ascending, this one among them
  int checks = -1;  // collective operations whose terms are compared, from the first on; -1: all
  Limits limits;
};

// Note [Order of operations]
// One worker runs a context's operations in the order in which they come, one at a time; the graph
// sees to that order by a token that goes through all of them (gradred/diff/token.py). No thread of
// the framework waits. A context's first operations, and those whose sizes the ranks must tell each
// other, begin with an exchange of their terms: so what differs fails with one text on all ranks,
// and the context can be used on. What fails later, or on one rank alone, ends the context on all
// its ranks: who finds it tells the others. A lost rank ends all transports (comm::World::Abort).
class Context {
 public:
  // A local call.
  Context(comm::World& world, std::shared_ptr<Traffic> traffic, ContextOptions options);
  // Closes.
  ~Context();

  int id() const { return options_.id; }

  // Does not wait; any thread. `operation` and `call` live until Done.
  void Submit(Operation* operation, std::string what, std::unique_ptr<Call> call);

  // In place of an operation `what` that this rank cannot run, for the reason `why`, so that the
  // others do not wait for it: a collective one fails on all ranks; of a message, which the peer
  // alone could match, the context ends. Does not wait; any thread.
  void Refuse(const std::string& what, const std::string& why, bool collective);

  // Fails what is under way and what comes, here and on the other members, and ends the worker.
  void Close(const std::string& reason);

 private:
  struct Item {
    Operation* operation;
    std::string what;
    std::unique_ptr<Call> call;
  };

  void Work();
  void Execute(const Item& item);
  Numbers ExchangeNumbers(std::vector<int64_t> mine);
  bool AllEqual(const Digest& digest, bool refused);
  [[noreturn]] void ThrowDisagreement(const Terms& terms, const Error* refusal);
  Status Named(const Status& cause, const Item& item) const;
  std::string Me() const;  // "rank 1"
  void Fail(const Status& cause);

  const ContextOptions options_;
  const std::shared_ptr<Traffic> traffic_;
  Channel channel_;
  std::atomic<int64_t> finished_{0};  // collective operations
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  bool closing_ = false;
  Status failure_;
  std::thread worker_;
};

// Fails with `error` on all ranks.
std::unique_ptr<Operation> MakeRefusal(Error error, bool collective);

// --- The contexts of this process; any thread ---

// Throws kInternal for an id in use. All contexts of a world come before CloseContexts.
void OpenContext(comm::World& world, ContextOptions options);
std::shared_ptr<Context> FindContext(int id);  // throws kNotInitialized
void CloseContext(int id, const std::string& reason);
// Before the world is closed or given up.
void CloseContexts(const std::string& reason);

}  // namespace gradred::diff
