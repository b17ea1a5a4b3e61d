#include "diff/context.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"
#include "diff/reduction.h"

namespace gradred::diff {
namespace {

// Of the ranks' texts: (rank, refused, text) in the order of ranks, each once.
std::string MergeTexts(const std::string& a, const std::string& b) {
  std::map<int32_t, std::pair<uint8_t, std::string>> texts;
  for (const std::string* blob : {&a, &b}) {
    Reader in(*blob);
    while (!in.AtEnd()) {
      const int32_t rank = in.Get<int32_t>();
      const auto refused = in.Get<uint8_t>();
      texts[rank] = {refused, in.GetString()};
    }
  }
  Writer out;
  for (const auto& [rank, text] : texts) {
    out.Put(rank);
    out.Put(text.first);
    out.PutString(text.second);
  }
  return out.Take();
}

bool SaysWhere(const std::string& text) { return text.find("context '") != std::string::npos; }

// Takes the place of an operation that this rank cannot run: it fails on all of them.
class Refusal final : public Operation {
 public:
  Refusal(Error error, bool collective) : error_(std::move(error)), collective_(collective) {}
  bool collective() const override { return collective_; }
  Terms TermsOf(const Inputs&, const Channel&) const override { throw error_; }
  void Run(Call&, Channel&, const Numbers&) override { throw error_; }

 private:
  const Error error_;
  const bool collective_;
};

// Nobody waits for it.
class RefusalCall final : public Call {
 public:
  explicit RefusalCall(std::unique_ptr<Operation> operation) : operation_(std::move(operation)) {}
  const Inputs& inputs() const override { return none_; }
  void* Output(int, const Dims&) override { return nullptr; }
  void Forward(int, int) override {}
  void Done(const Status&, bool) override {}

 private:
  const Inputs none_;
  const std::unique_ptr<Operation> operation_;
};

}  // namespace

Context::Context(comm::World& world, std::shared_ptr<Traffic> traffic, ContextOptions options)
    : options_(std::move(options)),
      traffic_(std::move(traffic)),
      channel_(world, traffic_, options_.id, options_.name, options_.members, options_.limits) {
  worker_ = std::thread([this] { Work(); });
}

Context::~Context() { Close("the context was given up"); }

void Context::Submit(Operation* operation, std::string what, std::unique_ptr<Call> call) {
  Status failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      queue_.push_back({operation, std::move(what), std::move(call)});
      wake_.notify_one();
      return;
    }
    failure = failure_;
  }
  call->Done(failure, false);
}

void Context::Refuse(const std::string& what, const std::string& why, bool collective) {
  auto operation = MakeRefusal(Error(Kind::kInvalidArgument, why), collective);
  Operation* const refused = operation.get();
  Submit(refused, what, std::make_unique<RefusalCall>(std::move(operation)));
}

void Context::Close(const std::string& reason) {
  const Status cause(Kind::kAbandoned,
                     Me() + " has left context '" + options_.name + "': " + reason);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
    if (failure_.ok()) failure_ = cause;
    wake_.notify_one();
  }
  traffic_->Note(options_.id, cause);
  worker_.join();
  try {
    channel_.TellLeaving(cause, finished_);
  } catch (const Error&) {
    // The transport has failed, which the others know.
  }
}

void Context::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    Status status = failure_;
    lock.unlock();
    bool keep = false;
    if (status.ok()) {
      const bool collective = item.operation->collective();
      channel_.Begin(item.what + " in context '" + options_.name + "'",
                     collective ? finished_.load() : -1);
      try {
        Execute(item);
      } catch (const AgreedError& error) {
        status = error.status();
      } catch (...) {
        status = Named(CurrentException(), item);
        Fail(status);
      }
      keep = channel_.End();
      finished_ += collective && !keep;
    }
    item.call->Done(status, keep);
    lock.lock();
  }
}

void Context::Fail(const Status& cause) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = cause;
  }
  const bool told = traffic_->Locked([&] { return !traffic_->ToldOf(options_.id).failure.ok(); });
  if (told) return;  // who told it told all
  try {
    traffic_->TellFailure(options_.id, cause, options_.members);
  } catch (const Error&) {
    // The transport has failed, which the others know.
  }
}

// Errors of an operation itself do not say where; those of the channel do.
Status Context::Named(const Status& cause, const Item& item) const {
  if (SaysWhere(cause.message()) || IsEngineError(cause.kind())) return cause;
  return {cause.kind(),
          Me() + ": " + item.what + " in context '" + options_.name + "': " + cause.message()};
}

std::string Context::Me() const {
  return "rank " + std::to_string(channel_.members()[channel_.rank()]);
}

void Context::Execute(const Item& item) {
  Operation& operation = *item.operation;
  Terms terms;
  std::unique_ptr<Error> refusal;
  try {
    terms = operation.TermsOf(item.call->inputs(), channel_);
  } catch (const Error& error) {
    refusal = std::make_unique<Error>(error);
  }
  const bool compares =
      operation.needs_numbers() || options_.checks < 0 || finished_ < options_.checks;
  if (operation.collective() && compares) {
    const bool equal = AllEqual(DigestOf(terms.alike, 0), refusal != nullptr);
    if (!equal) ThrowDisagreement(terms, refusal.get());
  } else if (refusal != nullptr) {
    const std::string why = refusal->what();
    if (!SaysWhere(why)) throw *refusal;
    throw Error(refusal->kind(), Me() + ": " + why);  // Named adds nothing to it
  }
  Numbers numbers;
  if (operation.needs_numbers()) numbers = ExchangeNumbers(std::move(terms.numbers));
  operation.Run(*item.call, channel_, numbers);
}

// What is compared in one small allreduce: of two numbers, the least, and the least of the
// complements.
bool Context::AllEqual(const Digest& digest, bool refused) {
  const auto hi = static_cast<int64_t>(digest.hi), lo = static_cast<int64_t>(digest.lo);
  constexpr int kWords = 5;
  auto* words = static_cast<int64_t*>(channel_.Scratch(2 * kWords * sizeof(int64_t)));
  int64_t* least = words + kWords;
  const int64_t mine[kWords] = {hi, ~hi, lo, ~lo, refused ? 0 : 1};
  std::copy(mine, mine + kWords, words);
  const Input input{words, DType::kInt64, {kWords}};
  ReduceTensor(input, reduce::ReduceOp::kMin, least, channel_);
  return !refused && std::equal(mine, mine + kWords, least);
}

Numbers Context::ExchangeNumbers(std::vector<int64_t> mine) {
  if (mine.size() > kNumbers)
    throw Error(Kind::kInternal, std::to_string(mine.size()) + " numbers for the other ranks");
  const size_t count = mine.size(), size = static_cast<size_t>(channel_.size());
  constexpr int64_t kBytes = kNumbers * sizeof(int64_t);
  mine.resize(kNumbers);
  auto* all = static_cast<int64_t*>(channel_.Scratch(static_cast<int64_t>(size + 1) * kBytes));
  int64_t* sent = all + size * kNumbers;
  std::copy(mine.begin(), mine.end(), sent);
  channel_.AllGather(sent, all, std::vector<int64_t>(size, kBytes));
  Numbers numbers;
  for (const int64_t* r = all; r < sent; r += kNumbers) numbers.emplace_back(r, r + count);
  return numbers;
}

void Context::ThrowDisagreement(const Terms& terms, const Error* refusal) {
  struct Group {
    uint8_t refused;
    std::string text;
    std::vector<int> ranks;
  };
  Writer out;
  out.Put<int32_t>(channel_.members()[channel_.rank()]);
  out.Put<uint8_t>(refusal != nullptr);
  out.PutString(refusal != nullptr ? refusal->what() : terms.alike);
  std::string blob = out.Take();
  channel_.Union(&blob, &MergeTexts);
  std::vector<Group> groups;  // in the order of lowest ranks
  bool any_refused = false;
  Reader in(blob);
  while (!in.AtEnd()) {
    const int32_t rank = in.Get<int32_t>();
    const auto refused = in.Get<uint8_t>();
    const std::string text = in.GetString();
    any_refused |= refused != 0;
    const auto at = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      return group.refused == refused && group.text == text;
    });
    if (at != groups.end())
      at->ranks.push_back(rank);
    else
      groups.push_back({refused, text, {rank}});
  }
  std::string text;
  for (const Group& group : groups) {
    if (any_refused && !group.refused) continue;
    text += (text.empty() ? "" : "; ") + RanksText(group.ranks) + ": " + group.text;
  }
  throw AgreedError(any_refused ? Kind::kInvalidArgument : Kind::kMismatch,
                    "operation " + std::to_string(finished_) + " of context '" + options_.name +
                        "': " + (any_refused ? "" : "the ranks differ: ") + text);
}

std::unique_ptr<Operation> MakeRefusal(Error error, bool collective) {
  return std::make_unique<Refusal>(std::move(error), collective);
}

namespace {

struct State {
  std::mutex mutex;
  std::shared_ptr<Traffic> traffic;  // of the world that the contexts are in
  std::map<int, std::shared_ptr<Context>> contexts;
  std::atomic<pid_t> pid{0};  // of the process that has opened them
};

State& TheState() {
  static State* state = new State;  // outlives every thread
  return *state;
}

}  // namespace

void OpenContext(comm::World& world, ContextOptions options) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.pid = getpid();
  if (state.traffic == nullptr) state.traffic = std::make_shared<Traffic>(world.diff());
  const int id = options.id;
  if (state.contexts.count(id) > 0)
    throw Error(Kind::kInternal, "context " + std::to_string(id) + " is open already");
  state.contexts[id] = std::make_shared<Context>(world, state.traffic, std::move(options));
}

std::shared_ptr<Context> FindContext(int id) {
  State& state = TheState();
  if (state.pid == getpid()) {
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto at = state.contexts.find(id);
    if (at != state.contexts.end()) return at->second;
  }
  throw Error(Kind::kNotInitialized, "context " + std::to_string(id) +
                                         " of gradred.diff is not open in this process: it was "
                                         "closed, or gradred was shut down");
}

void CloseContext(int id, const std::string& reason) {
  std::shared_ptr<Context> context;
  {
    State& state = TheState();
    if (state.pid != getpid()) return;  // a forked child has none of its own
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto at = state.contexts.find(id);
    if (at == state.contexts.end()) return;
    context = std::move(at->second);
    state.contexts.erase(at);
  }
  context->Close(reason);
}

void CloseContexts(const std::string& reason) {
  std::map<int, std::shared_ptr<Context>> contexts;
  std::shared_ptr<Traffic> traffic;
  {
    State& state = TheState();
    if (state.pid != getpid()) return;
    std::lock_guard<std::mutex> lock(state.mutex);
    contexts.swap(state.contexts);
    traffic.swap(state.traffic);
  }
  for (auto& [id, context] : contexts) context->Close(reason);
}

}  // namespace gradred::diff
