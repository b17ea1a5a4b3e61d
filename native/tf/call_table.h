// The calls of graphs that are under way: which batch of the engine a Submit, its Join and its Wait
// belong to.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "engine/engine.h"
#include "kernel_support.h"

namespace gradred::tf {

// Note [Begin, Submit, Join, Wait]
// In a graph a reduction is a Begin without inputs, which runs when the step begins; N Submits,
// which take its ticket (each runs when its gradient is there, and never waits); one Join that
// takes their tickets; and N asynchronous Waits that need the Join. So no Wait starts before the
// last gradient is there: if an op fails in the forward or backward pass, the step ends with that
// op's own error, and TensorFlow drops the tickets. A ticket dropped before Join is therefore the
// sign that this rank gave its step up, and the moment to tell the others. With one asynchronous op
// a tensor instead, the step would hang: TensorFlow waits for pending ops, and the others never
// submit the rest. Where N is 1, that cannot be: then one asynchronous op, Reduce, does all but
// Begin.

// Note [All or nothing]
// A Wait returns when the whole call has ended, and fails if any member failed. With each on its
// own, a rank whose peer gave up in the middle of its backward pass would update the variables of
// the groups that were complete by then, and the peer none: the ranks would go on with different
// models. The price is that no update overlaps with the last reductions.

// Of which reduction a call is: a loop runs its iterations in parallel.
struct CallKey {
  std::string domain;  // See Note [Names of specs]
  int instance = 0;    // See Note [Instances]
  uint64_t frame = 0;
  int64_t iteration = 0;
  bool operator<(const CallKey& o) const {
    return std::tie(domain, instance, frame, iteration) <
           std::tie(o.domain, o.instance, o.frame, o.iteration);
  }
};

// What a Submit hands over: TensorFlow's tensors, held until the engine is done with them.
struct Staged {
  SharedTensor output;    // the result will be here
  bool replaced = false;  // `output` is not what Submit emitted: who waits emits it
  SharedTensor input;     // null: `output` holds the input
  bool absent = false;    // no gradient on this rank
};

class Call : public std::enable_shared_from_this<Call> {
 public:
  using Waiter = std::function<void(const Status&)>;

  // Throws kNotInitialized without an engine.
  Call(int64_t id, CallKey key);
  // Once, in the order of calls: starts a batch of the engine, now or when its shapes are known.
  // Throws what Engine::Open throws.
  void Begin();

  int64_t id() const { return id_; }
  const CallKey& key() const { return key_; }
  int size() const { return static_cast<int>(members_.size()); }

  // Throws kInvalidArgument when the tensor does not fit the spec.
  // `then`: kStep, or kWait if a Wait by the same thread follows at once.
  void Submit(int position, Staged staged, engine::Then then);
  // `waiter` runs once, here or in another thread's step of the engine, when all results are there.
  // After Submit, holding no lock. See Note [All or nothing]
  // `step`: this thread moves the engine on meanwhile, for a while; needed after a Submit with
  // kWait.
  void Wait(Waiter waiter, bool step);
  // No call of this process waits for results. Where one does the graph has other branches, and
  // this thread may be the one that brings what the other ranks wait for: it does not step then.
  static bool NoneWaits();
  // From a waiter, once: what to emit in place of the staged tensor; null: that one.
  SharedTensor TakeReplacement(int position);
  // When all results are there: the number of ranks that brought this one.
  int present(int position);
  // The others learn that this rank will not submit the rest.
  void Abandon(const std::string& reason);

 private:
  struct Member {
    bool submitted = false;
    Staged staged;
    SharedTensor replacement;
    int present = 0;
  };
  using Ready = std::vector<std::pair<int, engine::Submission>>;  // by position

  engine::DomainSpecPtr Spec();                            // with mutex_ held
  void OpenIfReady(engine::Engine* engine, Ready* ready);  // with mutex_ held
  void OpenToAbandon(engine::Engine* engine);              // with mutex_ held
  engine::Submission SubmissionOf(int position);           // with mutex_ held
  void Finish(int position, const engine::Result& result);
  bool Finished();

  const int64_t id_;
  const CallKey key_;
  const engine::DomainSpecPtr spec_;
  const std::weak_ptr<engine::Engine> engine_;  // weak: a callback must not be its last owner
  std::mutex mutex_;
  std::vector<Member> members_;
  std::vector<engine::Shape> shapes_;
  int missing_;     // members not submitted
  int unfinished_;  // members without a result
  engine::OpenBatchPtr batch_;
  bool waited_for_ = false;
  Status failure_;  // the first one
  std::vector<Waiter> waiters_;
  std::string abandoned_;  // the reason
};
using CallPtr = std::shared_ptr<Call>;

class CallTable {
 public:
  static CallTable& The();

  // Opens a call, with one ticket, and returns its id. A call of the same reduction whose members
  // are not all submitted is given up: a step failed here before.
  int64_t Begin(const CallKey& key);
  CallPtr AddTicket(int64_t id);  // throws kInternal when the call is gone
  CallPtr Find(int64_t id);       // the same
  void Join(int64_t id);          // all members are submitted: tickets may go
  // The call of one member that a Begin's ticket stands for: no Submit takes it, and no Join
  // follows. Throws kInternal for another call, or if it was taken before.
  CallPtr Take(int64_t ticket);
  void DropTicket(int64_t id);
  void DropJoined(int64_t id);

 private:
  struct Open {
    CallPtr call;
    int tickets = 1;
    bool joined = false;
  };
  Open& At(int64_t id);     // with mutex_ held
  void Forget(int64_t id);  // with mutex_ held

  std::mutex mutex_;
  std::map<int64_t, Open> calls_;
  std::map<CallKey, int64_t> by_key_;  // calls that are not joined
  int64_t last_id_ = 0;
};

}  // namespace gradred::tf
