// Groups that do not only reduce: each entry is an exchange, run one after the other.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/group_run.h"
#include "engine/pack.h"

namespace gradred::engine {

int SetData::RankInSet(int world_rank) const {
  const auto at = std::lower_bound(members.begin(), members.end(), world_rank);
  return at != members.end() && *at == world_rank ? static_cast<int>(at - members.begin()) : -1;
}

namespace {

// Bytes of one row of the first dimension.
int64_t RowBytes(const EntrySpec& entry) {
  int64_t nbytes = DTypeSize(entry.dtype);
  for (size_t i = 1; i < entry.shape.size(); ++i) nbytes *= entry.shape[i];
  return nbytes;
}

void* Output(const EntrySpec& entry, Submission& submission, const Shape& shape) {
  if (submission.allocate) {
    void* output = submission.allocate(shape);
    int64_t count = 1;
    for (int64_t d : shape) count *= d;
    if (!output && count > 0)
      throw Error(Kind::kInternal, "no memory for the result of " + std::string(OpName(entry.op)) +
                                       " of '" + entry.label + "'");
    return output;
  }
  return submission.output;
}

// One entry: started by the constructor, polled to its end.
class Exchange {
 public:
  Exchange(const EntrySpec& entry, Submission& submission, SetData* set)
      : entry_(entry), submission_(submission), set_(*set), comm_(*set->communicator) {}
  virtual ~Exchange() = default;
  virtual bool Poll() = 0;
  Result result;
  int64_t nbytes = 0;            // that move, once known
  reduce::ConvertCounts counts;  // of a reduction, met by this rank

 protected:
  bool Done(comm::WorkPtr& work) {
    if (!work->Poll()) return false;
    ThrowIfError(work->status());
    return true;
  }
  const EntrySpec& entry_;
  Submission& submission_;
  SetData& set_;
  comm::Communicator& comm_;
};

class BarrierExchange final : public Exchange {
 public:
  using Exchange::Exchange;
  bool Poll() override {
    if (!work_) work_ = comm_.Barrier();
    return Done(work_);
  }

 private:
  comm::WorkPtr work_;
};

class BroadcastExchange final : public Exchange {
 public:
  using Exchange::Exchange;
  bool Poll() override {
    if (!work_) {
      const int64_t nbytes = entry_.count() * DTypeSize(entry_.dtype);
      const int root = set_.RankInSet(entry_.root);
      void* output = Output(entry_, submission_, entry_.shape);
      if (comm_.rank() == root && output != submission_.input && nbytes > 0)
        std::memcpy(output, submission_.input, nbytes);
      work_ = comm_.Broadcast(output, nbytes, root);
    }
    if (!Done(work_)) return false;
    result.shape = entry_.shape;
    return true;
  }

 private:
  comm::WorkPtr work_;
};

// First the numbers of rows, then the rows.
class AllGatherExchange final : public Exchange {
 public:
  using Exchange::Exchange;
  bool Poll() override {
    if (!counts_) {
      mine_ = entry_.shape[0];
      rows_.resize(comm_.size());
      counts_ = comm_.AllGatherV(&mine_, rows_.data(),
                                 std::vector<int64_t>(comm_.size(), sizeof(int64_t)));
    }
    if (!data_) {
      if (!Done(counts_)) return false;
      std::vector<int64_t> sizes;
      result.shape = entry_.shape;
      result.shape[0] = 0;
      for (int64_t rows : rows_) {
        result.shape[0] += rows;
        sizes.push_back(rows * RowBytes(entry_));
        nbytes += sizes.back();
      }
      data_ = comm_.AllGatherV(submission_.input, Output(entry_, submission_, result.shape),
                               std::move(sizes));
    }
    return Done(data_);
  }

 private:
  int64_t mine_ = 0;
  std::vector<int64_t> rows_;
  comm::WorkPtr counts_, data_;
};

class AllToAllExchange final : public Exchange {
 public:
  using Exchange::Exchange;
  bool Poll() override {
    const int n = comm_.size();
    if (!counts_) {
      send_ = submission_.splits.value_or(std::vector<int64_t>(n, entry_.shape[0] / n));
      result.received_splits.resize(n);
      const std::vector<int64_t> eight(n, sizeof(int64_t));
      counts_ = comm_.AllToAllV(send_.data(), eight, result.received_splits.data(), eight);
    }
    if (!data_) {
      if (!Done(counts_)) return false;
      std::vector<int64_t> send, recv;
      result.shape = entry_.shape;
      result.shape[0] = 0;
      for (int r = 0; r < n; ++r) {
        send.push_back(send_[r] * RowBytes(entry_));
        recv.push_back(result.received_splits[r] * RowBytes(entry_));
        result.shape[0] += result.received_splits[r];
        nbytes += send.back() + recv.back();
      }
      data_ = comm_.AllToAllV(submission_.input, std::move(send),
                              Output(entry_, submission_, result.shape), std::move(recv));
    }
    return Done(data_);
  }

 private:
  std::vector<int64_t> send_;
  comm::WorkPtr counts_, data_;
};

// Rows are spread as evenly as can be; the first ranks get one more. Each rank's rows are a section
// of their own, so that the parts start at aligned offsets.
class ReduceScatterExchange final : public Exchange {
 public:
  using Exchange::Exchange;
  bool Poll() override {
    if (!work_) Start();
    if (!Done(work_)) return false;
    const int rank = comm_.rank();
    result.shape = entry_.shape;
    result.shape[0] = rows_[rank];
    UnpackElements(entry_, member_, Output(entry_, submission_, result.shape), 0,
                   rows_[rank] * row_elements_, comm_.size(), comm_.average_residual(),
                   base_ + parts_[rank].begin, nullptr);
    return true;
  }

 private:
  void Start() {
    const int n = comm_.size();
    const reduce::Section whole = PlanMember(entry_, 0, &member_);
    row_elements_ = RowBytes(entry_) / DTypeSize(entry_.dtype);
    std::vector<reduce::Section> sections;
    int64_t offset = 0;
    for (int r = 0; r < n; ++r) {
      rows_.push_back(entry_.shape[0] / n + (r < entry_.shape[0] % n ? 1 : 0));
      const int64_t nbytes = rows_[r] * row_elements_ * member_.element_nbytes();
      sections.push_back({offset, nbytes / DTypeSize(whole.dtype), whole.dtype, whole.op});
      const int64_t end = reduce::AlignUp(offset + nbytes);
      parts_.push_back({offset, end});
      offset = end;
    }
    comm::Segment& segment = set_.buffer.Reserve(comm_, offset);
    base_ = static_cast<char*>(segment.data());
    int64_t first = 0;
    for (int r = 0; r < n; ++r) {
      const int64_t count = rows_[r] * row_elements_;
      PackElements(entry_, member_, submission_.input, first, count, n, base_ + parts_[r].begin,
                   &counts);
      first += count;
    }
    work_ = comm_.ReduceScatter(
        segment, 0, std::make_shared<const reduce::Layout>(std::move(sections)), parts_);
  }

  MemberPlan member_;
  int64_t row_elements_ = 0;
  std::vector<int64_t> rows_;  // [ranks]
  std::vector<reduce::Range> parts_;
  char* base_ = nullptr;
  comm::WorkPtr work_;
};

std::unique_ptr<Exchange> StartExchange(const EntrySpec& entry, Submission& submission,
                                        SetData* set) {
  switch (entry.op) {
    case Op::kBarrier:
      return std::make_unique<BarrierExchange>(entry, submission, set);
    case Op::kBroadcast:
      return std::make_unique<BroadcastExchange>(entry, submission, set);
    case Op::kAllGather:
      return std::make_unique<AllGatherExchange>(entry, submission, set);
    case Op::kAllToAll:
      return std::make_unique<AllToAllExchange>(entry, submission, set);
    case Op::kReduceScatter:
      return std::make_unique<ReduceScatterExchange>(entry, submission, set);
    case Op::kAllReduce:
      break;
  }
  throw Error(Kind::kInternal, "an allreduce in a group of exchanges");  // PlanOf refuses it
}

class ExchangeRun final : public GroupRun {
 public:
  ExchangeRun(RunItem item, SetData* set, MetricsStore* metrics)
      : item_(std::move(item)), set_(set), metrics_(metrics) {
    members_ = item_.batch->Take(item_.group);
    const GroupPlan& group = item_.batch->plan().groups[item_.group];
    for (int i = group.first; i < group.last; ++i) {
      entries_.push_back(&item_.spec->entries[i]);
      if (entries_.back()->op != Op::kBarrier)
        bytes_ += entries_.back()->count() * DTypeSize(entries_.back()->dtype);
    }
  }

  bool Poll() override {
    while (results_.size() < entries_.size()) {
      const size_t i = results_.size();
      if (!exchange_) exchange_ = StartExchange(*entries_[i], *members_[i], set_);
      const bool done = exchange_->Poll();
      nbytes = bytes_ + exchange_->nbytes;
      if (!done) return false;
      exchange_->result.present = set_->communicator->size();
      counts_.non_finite += exchange_->counts.non_finite;
      counts_.saturated += exchange_->counts.saturated;
      results_.push_back(std::move(exchange_->result));
      exchange_.reset();
    }
    metrics_->Update([this](Metrics& m) {
      ++m.groups;
      m.entries += static_cast<int64_t>(entries_.size());
      m.bytes += bytes_;
      m.non_finite += counts_.non_finite;
      m.saturated += counts_.saturated;
    });
    item_.batch->Finish(item_.group, std::move(results_));
    return true;
  }

 private:
  RunItem item_;
  SetData* set_;
  MetricsStore* metrics_;
  std::vector<Submission*> members_;
  std::vector<const EntrySpec*> entries_;
  int64_t bytes_ = 0;  // of the entries
  reduce::ConvertCounts counts_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<Result> results_;
};

}  // namespace

std::unique_ptr<GroupRun> StartExchangeRun(RunItem item, SetData* set, MetricsStore* metrics) {
  return std::make_unique<ExchangeRun>(std::move(item), set, metrics);
}

std::unique_ptr<GroupRun> StartGroup(RunItem item, SetData* set, MetricsStore* metrics) {
  if (PlanOf(*item.spec)->groups[item.group].reduces)
    return StartReduceRun(std::move(item), set, metrics);
  return StartExchangeRun(std::move(item), set, metrics);
}

}  // namespace gradred::engine
