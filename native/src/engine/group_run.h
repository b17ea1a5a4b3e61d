// One group on its way through the data communicator, as a state machine polled by the data loop.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/batch.h"
#include "engine/fusion_buffer.h"
#include "engine/slots.h"

namespace gradred::engine {

// What the agreed order says to run next in a process set.
struct RunItem {
  int set_id = 0;
  BatchPtr batch;      // null: this rank has joined and supplies zeros
  DomainSpecPtr spec;  // of the batch, or from the declaration of another rank
  int group = 0;
  bool someone_joined = false;
};

// The data side of a process set: its communicator and memory. Belongs to the data loop.
struct SetData {
  ~SetData() {
    if (slots) slots->Close();  // before their communicator goes
  }
  std::vector<int> members;  // world ranks
  std::unique_ptr<comm::Communicator> communicator;
  FusionBuffer buffer;
  bool buffer_taken = false;  // by a run
  SlotsPtr slots;
  int64_t counted_nbytes = 0;           // of memory for packing, in the metrics
  int RankInSet(int world_rank) const;  // -1: no member
};

class GroupRun {
 public:
  virtual ~GroupRun() = default;
  // True once finished: the batch's members have been completed. Throws for errors that end the
  // engine.
  virtual bool Poll() = 0;
  // All its calls of the communicator have been made, so another run may make its own.
  virtual bool started_works() const { return false; }
  Nanos started = Now();
  int64_t nbytes = 0;  // that move; known at the latest when they do
};

// A group of allreduces: pack, reduce in place, unpack. Any other group: its entries one after the
// other.
std::unique_ptr<GroupRun> StartGroup(RunItem item, SetData* set, MetricsStore* metrics);

std::unique_ptr<GroupRun> StartReduceRun(RunItem item, SetData* set,
                                         MetricsStore* metrics);  // reduce_run.cpp
std::unique_ptr<GroupRun> StartExchangeRun(RunItem item, SetData* set,
                                           MetricsStore* metrics);  // exchange_run.cpp

}  // namespace gradred::engine
