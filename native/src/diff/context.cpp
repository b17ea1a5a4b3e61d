#include "diff/context.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/digest.h"

namespace gradred::diff {
namespace {

// What a rank tells of an operation.
struct Record {
  uint64_t hi = 0, lo = 0;  // digest of the terms
  int64_t refused = 0;
  int64_t count = 0;
  int64_t numbers[kNumbers] = {};
};

// Of the ranks' texts: (rank, text) in the order of ranks, each once.
std::string MergeTexts(const std::string& a, const std::string& b) {
  std::map<int32_t, std::string> texts;
  for (const std::string* blob : {&a, &b}) {
    Reader in(*blob);
    while (!in.AtEnd()) {
      const int32_t rank = in.Get<int32_t>();
      texts.emplace(rank, in.GetString());
    }
  }
  Writer out;
  for (const auto& [rank, text] : texts) {
    out.Put(rank);
    out.PutString(text);
  }
  return out.Take();
}

std::string Ranks(const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

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

void Context::Close(const std::string& reason) {
  const std::string me = "rank " + std::to_string(channel_.members()[channel_.rank()]);
  const Status cause(Kind::kAbandoned, me + " has left context '" + options_.name + "': " + reason);
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
    traffic_->Tell(options_.id, cause, options_.members);
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
      channel_.Begin(item.what + " in context '" + options_.name + "'");
      try {
        Execute(item);
      } catch (const AgreedError& error) {
        status = error.status();
      } catch (...) {
        status = CurrentException();
        Fail(status);
      }
      keep = channel_.End();
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
  const bool told = traffic_->Locked([&] { return traffic_->ToldOf(options_.id) != nullptr; });
  if (told) return;  // who told it told all
  try {
    traffic_->Tell(options_.id, cause, options_.members);
  } catch (const Error&) {
    // The transport has failed, which the others know.
  }
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
  Numbers numbers;
  const bool compared =
      operation.collective() && (operation.needs_numbers() || position_ < options_.checks);
  if (compared)
    numbers = Agree(item, terms, refusal.get());
  else if (refusal != nullptr)
    throw Error(refusal->kind(), "rank " + std::to_string(channel_.members()[channel_.rank()]) +
                                     ": " + item.what + " in context '" + options_.name +
                                     "': " + refusal->what());
  if (operation.collective()) ++position_;
  operation.Run(*item.call, channel_, numbers);
}

Numbers Context::Agree(const Item& item, const Terms& terms, const Error* refusal) {
  const int64_t position = position_;
  const auto size = static_cast<size_t>(channel_.size());
  Record mine;
  const Digest digest = DigestOf(terms.alike, 0);
  mine.hi = digest.hi;
  mine.lo = digest.lo;
  mine.refused = refusal != nullptr;
  mine.count = static_cast<int64_t>(terms.numbers.size());
  if (mine.count > kNumbers)
    throw Error(Kind::kInternal, item.what + " has more than " + std::to_string(kNumbers) +
                                     " numbers for the other ranks");
  std::copy(terms.numbers.begin(), terms.numbers.end(), mine.numbers);
  // Kept where a failure may leave it.
  auto* records =
      static_cast<Record*>(channel_.Scratch(static_cast<int64_t>((size + 1) * sizeof(Record))));
  records[size] = mine;
  channel_.AllGather(&records[size], records, std::vector<int64_t>(size, sizeof(Record)));
  channel_.Agreed();

  const bool good = std::all_of(records, records + size, [&](const Record& r) {
    return r.refused == 0 && r.hi == mine.hi && r.lo == mine.lo;
  });
  if (good) {
    Numbers numbers;
    for (size_t r = 0; r < size; ++r)
      numbers.emplace_back(records[r].numbers, records[r].numbers + records[r].count);
    return numbers;
  }
  std::vector<bool> refused;
  for (size_t r = 0; r < size; ++r) refused.push_back(records[r].refused != 0);
  Writer out;
  out.Put<int32_t>(channel_.rank());
  out.PutString(refusal != nullptr ? refusal->what() : terms.alike);
  std::string blob = out.Take();
  channel_.Union(&blob, &MergeTexts);
  std::vector<std::string> texts(size);
  Reader in(blob);
  while (!in.AtEnd()) {
    const int32_t rank = in.Get<int32_t>();
    texts.at(rank) = in.GetString();
  }
  ++position_;
  ThrowDisagreement(
      texts, refused,
      "operation " + std::to_string(position) + " of context '" + options_.name + "'");
  return {};
}

void Context::ThrowDisagreement(const std::vector<std::string>& texts,
                                const std::vector<bool>& refused, const std::string& what) const {
  const bool any = std::find(refused.begin(), refused.end(), true) != refused.end();
  std::vector<std::pair<std::string, std::vector<int>>> groups;  // in the order of lowest ranks
  for (size_t r = 0; r < texts.size(); ++r) {
    if (any && !refused[r]) continue;
    const auto at = std::find_if(groups.begin(), groups.end(),
                                 [&](const auto& group) { return group.first == texts[r]; });
    const int rank = channel_.members()[r];
    if (at != groups.end())
      at->second.push_back(rank);
    else
      groups.push_back({texts[r], {rank}});
  }
  std::string text;
  for (const auto& [terms, ranks] : groups)
    text += (text.empty() ? "" : "; ") + Ranks(ranks) + ": " + terms;
  throw AgreedError(any ? Kind::kInvalidArgument : Kind::kMismatch,
                    what + (any ? ": " : ": the ranks differ: ") + text);
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
