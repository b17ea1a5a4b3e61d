// Ranks of one set that a test moves by hand, and what the protocol told each of them, as lines of
// text.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "protocol_harness.h"

namespace protocol {

inline DeclarationPtr Domain(const std::string& name, const std::vector<std::string>& signatures,
                             std::vector<int> group_ends = {}, const std::string& label = "x") {
  auto declaration = std::make_shared<Declaration>();
  declaration->name = name;
  for (const std::string& signature : signatures)
    declaration->entries.push_back({signature, label});
  declaration->group_ends =
      group_ends.empty() ? std::vector<int>{static_cast<int>(signatures.size())} : group_ends;
  declaration->payload = "payload of " + name;
  return declaration;
}

// Ranks whose actions are written down as text, a list a rank: "run a.0", "zeros a.0", "fail a:
// ...".
class Ranks {
 public:
  explicit Ranks(int size, NegotiatorOptions options = {})
      : log(size),
        set(&clock, size, options, [this](int rank, const Action& action) { Note(rank, action); }) {
  }

  void Send(int rank, const Event& event) { set.Send(rank, event); }
  void Submit(int rank, const DeclarationPtr& declaration) {
    Send(rank, Begin{declaration});
    for (size_t group = 0; group < declaration->group_ends.size(); ++group)
      Send(rank, Ready{declaration->name, static_cast<int>(group)});
  }
  void Settle() { clock.RunAll(); }
  const NegotiatorCounters& counters() { return set.at(0).counters(); }
  // The log of each rank is this one; it is emptied.
  void Expect(const std::vector<std::string>& lines) {
    for (size_t rank = 0; rank < log.size(); ++rank) ExpectOf(static_cast<int>(rank), lines);
  }
  void ExpectOf(int rank, const std::vector<std::string>& lines) {
    std::string seen, expected;
    for (const std::string& line : log[rank]) seen += line + "\n";
    for (const std::string& line : lines) expected += line + "\n";
    CHECK_EQ(seen, expected);
    log[rank].clear();
  }

  VirtualClock clock;
  std::vector<std::vector<std::string>> log;
  std::map<std::string, std::string> payloads;  // of the declarations that ran as zeros
  Set set;

 private:
  void Note(int rank, const Action& action) {
    if (const auto* run = std::get_if<Run>(&action)) {
      log[rank].push_back((run->mine ? "run " : "zeros ") + run->declaration->name + "." +
                          std::to_string(run->group) + (run->someone_joined ? " joined" : ""));
      if (!run->mine) payloads[run->declaration->name] = run->declaration->payload;
    }
    if (const auto* fail = std::get_if<Fail>(&action))
      log[rank].push_back("fail " + fail->domain + ": " + fail->status.ToString());
    if (const auto* joined = std::get_if<AllJoined>(&action))
      log[rank].push_back("all joined, last " + std::to_string(joined->last_rank));
    if (std::get_if<AllShutDown>(&action)) log[rank].push_back("all shut down");
  }
};

inline const std::string kHint =
    ". Every rank must bring the same tensors in the same order under one name";

}  // namespace protocol
