// Random programs over simulated ranks. A program is a list of batches in an order that all ranks
// could follow; each rank submits groups when the results it waits for have arrived, which are of
// earlier batches (or earlier groups of the same one): so a valid schedule exists.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/negotiator.h"

namespace protocol {

using namespace gradred;
using namespace gradred::core;

struct ProgramOptions {
  int max_ranks = 16;
  bool waits = true;      // submissions wait for results; off: each domain has one batch
  bool timer = true;      // rule 4
  bool two_sets = false;  // the second one has a part of the ranks
  bool joins = false;
  bool abandons = false;
  bool resigns = false;  // shapes and cuts of a domain change from batch to batch
  bool mismatches = false;
  bool early_shutdown = false;
  bool retires = false;  // after a few rounds
};

struct BatchPlan {
  int set = 0, epoch = 0;
  std::vector<DeclarationPtr> variants;  // by the rank's choice; more than one: a mismatch
  std::vector<int> choice;               // [world rank]
  const std::string& name() const { return variants[0]->name; }
  int groups(int rank) const { return static_cast<int>(variants[choice[rank]]->group_ends.size()); }
};

struct Wait {
  int batch, group;  // group -1: the whole batch has ended
};

struct BatchTask {  // of one rank
  bool takes_part = false;
  std::vector<Wait> before_begin;
  Nanos begin_delay = 0;
  struct Group {
    std::vector<Wait> before;
    Nanos delay = 0;
  };
  std::vector<Group> groups;
  bool abandons = false;
  Nanos abandon_delay = 0;
};

struct Program {
  int ranks = 1, epochs = 1;
  std::vector<std::vector<int>> sets;  // world ranks
  std::vector<BatchPlan> batches;
  std::vector<std::vector<BatchTask>> tasks;  // [rank][batch]
  std::vector<std::vector<bool>> join_waits;  // [rank][epoch]: for the results before Join
  bool joins = false;
  std::vector<int> shutdown_at;  // [rank]: shuts down before this batch; or the number of batches
  std::vector<bool> shutdown_waits;
};

class Maker {
 public:
  Maker(uint64_t seed, const ProgramOptions& options) : random_(seed), options_(options) {}

  Program Make() {
    Program p;
    p.ranks = 1 + Below(Chance(25) ? options_.max_ranks : std::min(options_.max_ranks, 5));
    p.sets.emplace_back();
    for (int rank = 0; rank < p.ranks; ++rank) p.sets[0].push_back(rank);
    if (options_.two_sets) {
      p.sets.emplace_back();
      for (int rank = 0; rank < p.ranks; ++rank)
        if (Chance(60)) p.sets[1].push_back(rank);
      if (p.sets[1].empty()) p.sets[1].push_back(Below(p.ranks));
    }
    p.joins = options_.joins;
    p.epochs = options_.joins && options_.waits ? 1 + Below(3) : 1;
    const int batches = 1 + Below(16);
    const int domains = options_.waits ? 1 + Below(6) : batches;
    for (int b = 0; b < batches; ++b) p.batches.push_back(MakeBatch(p, b, batches, domains));
    MakeTasks(&p);
    return p;
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  bool Chance(int percent) { return Below(100) < percent; }
  // Often within one round, so that events meet rounds in every way.
  Nanos Delay() {
    const int kind = Below(10);
    return kind < 3 ? 0 : Below(kind < 6 ? 60 : kind < 9 ? 400 : 20000) * kMicrosecond;
  }

  DeclarationPtr MakeDeclaration(const std::string& name, int version) {
    auto declaration = std::make_shared<Declaration>();
    declaration->name = name;
    int entries = 0;
    for (int groups = 1 + (std::hash<std::string>()(name) + version) % 4; groups > 0; --groups) {
      entries += 1 + Below(2);
      declaration->group_ends.push_back(entries);
    }
    for (int i = 0; i < entries; ++i)
      declaration->entries.push_back({"v" + std::to_string(version), name + "/x"});
    return declaration;
  }

  BatchPlan MakeBatch(const Program& p, int b, int batches, int domains) {
    BatchPlan plan;
    plan.set = Below(static_cast<int>(p.sets.size()));
    plan.epoch = b * p.epochs / batches;
    const int domain = options_.waits ? Below(domains) : b;
    const std::string name = "d" + std::to_string(domain) + (plan.set ? "b" : "a");
    int version = 0;
    if (options_.resigns && Chance(50)) version = Below(3);
    // The same cuts whenever a version comes back, or it would be yet another signature.
    auto& known = declared_[name + "#" + std::to_string(version)];
    if (!known) known = MakeDeclaration(name, version);
    plan.variants.push_back(known);
    plan.choice.assign(p.ranks, 0);
    if (options_.mismatches && Chance(25)) {
      plan.variants.push_back(MakeDeclaration(name, 7));
      for (int& choice : plan.choice) choice = Below(2);
    }
    return plan;
  }

  // Something before group `group` of batch `b` (group 0: before the batch) that rank takes part
  // in.
  void AddWaits(const Program& p, int rank, int b, int group, std::vector<Wait>* waits) {
    if (!options_.waits) return;
    for (int tries = Below(3); tries > 0; --tries) {
      const int other = Below(b + 1);
      if (!p.tasks[rank][other].takes_part) continue;
      const int groups = other == b ? group : p.batches[other].groups(rank);
      if (groups > 0) waits->push_back({other, Below(groups)});
    }
  }

  void MakeTasks(Program* p) {
    const int batches = static_cast<int>(p->batches.size());
    p->tasks.resize(p->ranks);
    for (int rank = 0; rank < p->ranks; ++rank) {
      const bool early = options_.early_shutdown && Chance(40);
      p->shutdown_at.push_back(early ? Below(batches + 1) : batches);
      p->shutdown_waits.push_back(!early || (options_.waits && Chance(30)));
      std::vector<int> cut(p->epochs, batches);  // a rank joins before this batch of the epoch
      p->join_waits.emplace_back();
      for (int epoch = 0; epoch < p->epochs; ++epoch) {
        if (p->joins) cut[epoch] = Below(batches + 1);
        p->join_waits[rank].push_back(options_.waits && Chance(50));
      }
      p->tasks[rank].resize(batches);
      for (int b = 0; b < batches; ++b) MakeTask(p, rank, b, cut[p->batches[b].epoch]);
    }
  }

  void MakeTask(Program* p, int rank, int b, int cut) {
    const BatchPlan& plan = p->batches[b];
    const auto& members = p->sets[plan.set];
    BatchTask& task = p->tasks[rank][b];
    task.takes_part =
        b < cut && b < p->shutdown_at[rank] && std::count(members.begin(), members.end(), rank) > 0;
    if (!task.takes_part) return;
    for (int before = b - 1; before >= 0; --before) {
      const BatchPlan& other = p->batches[before];
      if (!p->tasks[rank][before].takes_part || other.name() != plan.name()) continue;
      task.before_begin.push_back({before, -1});
      break;
    }
    AddWaits(*p, rank, b, 0, &task.before_begin);
    task.begin_delay = Delay();
    task.groups.resize(plan.groups(rank));
    for (int group = 0; group < plan.groups(rank); ++group) {
      AddWaits(*p, rank, b, group, &task.groups[group].before);
      task.groups[group].delay = Delay();
    }
    task.abandons = options_.abandons && Chance(10);
    task.abandon_delay = Delay();
  }

  std::mt19937_64 random_;
  const ProgramOptions options_;
  std::map<std::string, DeclarationPtr> declared_;
};

}  // namespace protocol
