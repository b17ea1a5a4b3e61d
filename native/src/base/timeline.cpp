#include "base/timeline.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/doorbell.h"
#include "base/log.h"
#include "base/status.h"
#include "base/timeline_file.h"

namespace gradred::timeline {

std::atomic<bool> detail::recording{false};
std::atomic<bool> detail::mark_rounds{false};

namespace {
std::atomic<bool> chunks{false};  // see Options
thread_local Spent spent{};
}  // namespace

void detail::Spend(Work work, Nanos begin, int64_t nbytes) {
  static constexpr const char* kNames[kWorks] = {"pack", "sum", "unpack"};
  const Nanos duration = Now() - begin;
  spent[static_cast<size_t>(work)] += duration;
  if (!chunks.load(std::memory_order_relaxed)) return;
  Record record;
  record.begin = begin;
  record.duration = duration;
  record.name = kNames[static_cast<size_t>(work)];
  record.nbytes = nbytes;
  record.shape = Shape::kSpan;
  Push(record);
}

Spent TakeSpent() {
  const Spent taken = spent;
  spent = {};
  return taken;
}

namespace {

std::atomic<uint32_t> stages{0};  // that have begun

constexpr Nanos kEvery = 100 * kMillisecond;

// A thread's ring. A thread that ends leaves it to the next one of its name.
struct Lane {
  Lane(const char* name, int number, size_t records)
      : name(name), number(number), ring(records), owned(true) {}
  const char* const name;
  const int number;
  Ring ring;
  std::atomic<bool> owned;
  bool named = false;  // in the file
};

struct Domain {
  std::shared_ptr<const DomainInfo> info;
  std::shared_ptr<const void> plan;  // kept, so that its address stays its own
  uint32_t id = 0, batches = 0;
};

bool Same(const DomainInfo& a, const DomainInfo& b) {
  const auto equal = [](const GroupInfo& x, const GroupInfo& y) {
    return x.first == y.first && x.last == y.last && x.nbytes == y.nbytes;
  };
  return a.set == b.set && a.labels == b.labels &&
         std::equal(a.groups.begin(), a.groups.end(), b.groups.begin(), b.groups.end(), equal);
}

// As `top -H` and debuggers show the calling thread; 15 characters at most.
void SetSystemName(const char* name) {
  pthread_setname_np(pthread_self(), ("gr-" + std::string(name)).substr(0, 15).c_str());
}

class Recorder {
 public:
  void Start(const Options& options) {
    std::lock_guard<std::mutex> lock(session_);
    if (thread_.joinable() && !Recording()) thread_.join();  // ended by a failed write
    if (thread_.joinable())
      throw Error(Kind::kInvalidArgument, "the timeline is being recorded already, to '" +
                                              options_.path + "'; stop it first");
    file_ = std::make_unique<File>(options.path);
    options_ = options;
    lines_ = std::make_unique<Lines>(options, file_.get(), stages.load());
    lines_->Header();
    file_->Flush();
    {
      std::lock_guard<std::mutex> lanes(lanes_mutex_);
      ring_records_ = options.ring_records;
      for (const auto& lane : lanes_) {
        lane->ring.Skip();
        lane->named = false;
      }
    }
    {
      std::lock_guard<std::mutex> domains(domains_mutex_);
      domains_.clear();  // their numbers are never used again
      fresh_.clear();
      notes_.clear();
    }
    known_.clear();
    events_ = lost_ = 0;
    stopping_.store(false);
    static const int child = pthread_atfork(nullptr, nullptr, [] { detail::recording = false; });
    (void)child;
    detail::mark_rounds.store(options.mark_rounds);
    chunks.store(options.chunks);
    detail::recording.store(true);
    thread_ = std::thread([this] { Run(); });
  }

  void Stop() {
    std::lock_guard<std::mutex> lock(session_);
    if (!thread_.joinable()) return;
    detail::recording.store(false);
    stopping_.store(true);
    bell_.Ring();
    thread_.join();
    lines_.reset();
    file_.reset();
  }

  void Hurry() {
    if (Recording()) bell_.Ring();
  }

  std::string Path() {
    std::lock_guard<std::mutex> lock(session_);
    return Recording() ? options_.path : "";
  }

  Lane* Attach(const char* name) {
    std::lock_guard<std::mutex> lock(lanes_mutex_);
    for (const auto& lane : lanes_) {
      bool owned = false;
      if (lane->name == name && lane->owned.compare_exchange_strong(owned, true)) return lane.get();
    }
    lanes_.push_back(
        std::make_unique<Lane>(name, static_cast<int>(lanes_.size()) + 1, ring_records_));
    return lanes_.back().get();
  }

  void RingBell() { bell_.Ring(); }

  void Note(const char* name, const std::string& text) {
    std::lock_guard<std::mutex> lock(domains_mutex_);
    notes_.push_back({name, text, Now()});
  }

  Tag BeginBatch(const std::string& name, const std::shared_ptr<const void>& plan,
                 const std::function<DomainInfo()>& describe) {
    std::lock_guard<std::mutex> lock(domains_mutex_);
    Domain& domain = domains_[name];
    if (domain.plan != plan) {
      auto info = std::make_shared<const DomainInfo>(describe());
      if (!domain.info || !Same(*domain.info, *info)) {
        domain.id = ++last_id_;
        domain.info = info;
        fresh_.push_back({domain.id, std::move(info), Now()});
      }
      domain.plan = plan;
    }
    return {domain.id, ++domain.batches};
  }

 private:
  struct Fresh {
    uint32_t id;
    std::shared_ptr<const DomainInfo> info;
    Nanos at;
  };
  struct TextNote {
    const char* name;
    std::string text;
    Nanos at;
  };

  void Run() {
    SetSystemName("timeline");
    // The work that is watched comes first.
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 10);
    bool good = true;
    for (bool last = false; good && !last;) {
      const uint32_t ticket = bell_.Ticket();
      last = stopping_.load();
      Drain();
      good = file_->Flush();
      if (good && !last) bell_.Sleep(ticket, kEvery);
    }
    if (good) good = file_->Close(lines_->Last(events_, lost_));
    if (good) return;
    const std::string reason = strerror(errno);
    detail::recording.store(false);
    Log(LogLevel::kWarning,
        "the timeline ends here: '" + options_.path + "' cannot be written: " + reason);
  }

  void Drain() {
    std::vector<Lane*> lanes;
    {
      std::lock_guard<std::mutex> lock(lanes_mutex_);
      for (const auto& lane : lanes_) lanes.push_back(lane.get());
    }
    // Before the domains, which come into being before their events.
    std::vector<std::vector<Record>> taken(lanes.size());
    std::vector<uint64_t> lost(lanes.size());
    for (size_t i = 0; i < lanes.size(); ++i) lost[i] = lanes[i]->ring.Take(&taken[i]);
    std::vector<Fresh> fresh;
    std::vector<TextNote> notes;
    {
      std::lock_guard<std::mutex> lock(domains_mutex_);
      fresh.swap(fresh_);
      notes.swap(notes_);
    }
    for (Fresh& domain : fresh) {
      lines_->Domain(domain.id, *domain.info, domain.at);
      known_[domain.id] = std::move(domain.info);
    }
    for (const TextNote& note : notes) lines_->Text(note.name, note.text, note.at);
    for (size_t i = 0; i < lanes.size(); ++i) {
      Lane* lane = lanes[i];
      if (taken[i].empty()) continue;
      if (!lane->named) {
        lines_->Thread(lane->number, lane->name);
        lane->named = true;
      }
      if (lost[i] > 0) lines_->Lost(lost[i], lane->number, taken[i].front().begin);
      for (const Record& record : taken[i]) {
        const auto at = known_.find(record.domain);
        lines_->Event(record, lane->number, record.domain,
                      at == known_.end() ? nullptr : at->second.get());
      }
      events_ += taken[i].size();
      lost_ += lost[i];
    }
  }

  std::mutex session_;  // Start, Stop
  Options options_;
  std::unique_ptr<File> file_;
  std::unique_ptr<Lines> lines_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  DoorbellWord word_;
  Doorbell bell_{&word_, false};

  std::mutex lanes_mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  size_t ring_records_ = 16384;

  std::mutex domains_mutex_;
  std::unordered_map<std::string, Domain> domains_;
  std::vector<Fresh> fresh_;  // not in the file yet
  std::vector<TextNote> notes_;
  uint32_t last_id_ = 0;

  // Of the thread.
  std::unordered_map<uint32_t, std::shared_ptr<const DomainInfo>> known_;
  uint64_t events_ = 0, lost_ = 0;
};

Recorder& The() {
  static auto* recorder = new Recorder;  // outlives every thread
  return *recorder;
}

// The calling thread's lane, given back when the thread ends.
struct Attached {
  Lane* lane = nullptr;
  const char* name = "submit";
  ~Attached() {
    if (lane) lane->owned.store(false, std::memory_order_release);
  }
};
thread_local Attached attached;

}  // namespace

void Start(const Options& options) { The().Start(options); }
void Stop() { The().Stop(); }
void Hurry() { The().Hurry(); }
std::string Path() { return The().Path(); }
void NameThread(const char* name) {
  attached.name = name;
  SetSystemName(name);
}

void Push(const Record& record) {
  if (!Recording()) return;
  if (!attached.lane) attached.lane = The().Attach(attached.name);
  const uint64_t waiting = attached.lane->ring.Push(record);
  if (waiting == attached.lane->ring.capacity() / 2) The().RingBell();
}

void Note(const char* name, const std::string& text) {
  if (Recording()) The().Note(name, text);
}

Tag BeginBatch(const std::string& name, const std::shared_ptr<const void>& plan,
               const std::function<DomainInfo()>& describe) {
  return Recording() ? The().BeginBatch(name, plan, describe) : Tag{};
}

void Stage::Begin(const char* name, int64_t nbytes) {
  record_ = {};
  record_.begin = Now();
  record_.name = name;
  record_.nbytes = nbytes;
  record_.batch = ++stages;  // of no domain: tells stages of one name apart
  record_.shape = Shape::kOpen;
  Push(record_);
}

void Stage::DoEnd() {
  record_.begin = Now();
  record_.nbytes = kNone;
  record_.shape = Shape::kClose;
  Push(record_);
  record_.name = nullptr;
}

void Rounds::Begin(const char* name, size_t words) {
  name_ = Recording() ? name : nullptr;
  if (!name_) return;
  begin_ = Now();
  words_ = static_cast<int>(words);
}

void Rounds::End(bool productive) {
  if (!name_) return;
  Record record;
  record.begin = begin_;
  record.duration = Now() - begin_;
  record.name = productive ? name_ : "empty round";
  record.set = static_cast<uint16_t>(set_);
  if (words_ > 0) record.value = words_;
  record.shape = Shape::kRound;
  Push(record);
  if (detail::mark_rounds.load(std::memory_order_relaxed)) {
    record.begin += record.duration;
    record.shape = Shape::kMark;
    Push(record);
  }
  name_ = nullptr;
}

}  // namespace gradred::timeline
