#include "comm/roster.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"

namespace gradred::comm {
namespace {

struct Hello {
  std::string host_id, host;
  ProcessId process;
  uint64_t nonce = 0;
  std::string problem;
  std::vector<std::string> settings;  // in the order of kSettings
};

const char* const kSettings[] = {"GRADRED_INTRA", "GRADRED_VIRTUAL_NODES", "GRADRED_CHUNK_BYTES"};

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string Pack(const WorldOptions& options) {
  std::random_device random;
  Writer writer;
  writer.PutString(HostId());
  writer.PutString(HostName());
  const ProcessId me = ThisProcess();
  writer.Put(me.pid);
  writer.Put(me.start);
  writer.Put(static_cast<uint64_t>(random()) << 32 | random());
  writer.PutString(options.problem);
  writer.PutString(options.intra);
  writer.PutString(std::to_string(options.virtual_nodes));
  writer.PutString(std::to_string(options.chunk_nbytes));
  return writer.Take();
}

Hello Unpack(const std::string& bytes) {
  Reader reader(bytes);
  Hello hello;
  hello.host_id = reader.GetString();
  hello.host = reader.GetString();
  hello.process.pid = reader.Get<int>();
  hello.process.start = reader.Get<uint64_t>();
  hello.nonce = reader.Get<uint64_t>();
  hello.problem = reader.GetString();
  while (!reader.AtEnd()) hello.settings.push_back(reader.GetString());
  return hello;
}

void CheckProblems(const std::vector<Hello>& hellos) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < hellos.size(); ++rank)
    if (!hellos[rank].problem.empty())
      ranks_of[hellos[rank].problem].push_back(static_cast<int>(rank));
  std::string text;
  for (const auto& [problem, ranks] : ranks_of)
    text += (text.empty() ? "" : "; ") + problem + ", on " + RanksText(ranks);
  if (!text.empty()) throw Error(Kind::kInvalidArgument, text);
}

void CheckSettings(const std::vector<Hello>& hellos) {
  for (size_t i = 0; i < std::size(kSettings); ++i) {
    std::map<std::string, std::vector<int>> ranks_by_value;
    for (size_t rank = 0; rank < hellos.size(); ++rank) {
      ranks_by_value[hellos[rank].settings.at(i)].push_back(static_cast<int>(rank));
    }
    if (ranks_by_value.size() == 1) continue;
    std::string text;
    for (const auto& [value, ranks] : ranks_by_value) {
      text += (text.empty() ? "" : ", ") + value + " on " + RanksText(ranks);
    }
    throw Error(Kind::kMismatch, std::string("the setting ") + kSettings[i] +
                                     " must be the same on all ranks: it is " + text);
  }
}

}  // namespace

int Roster::machines() const { return 1 + *std::max_element(machine_of.begin(), machine_of.end()); }

std::vector<int> Roster::MachineRanks(int rank) const {
  std::vector<int> result;
  for (size_t r = 0; r < machine_of.size(); ++r) {
    if (machine_of[r] == machine_of[static_cast<size_t>(rank)]) {
      result.push_back(static_cast<int>(r));
    }
  }
  return result;
}

Roster MakeRoster(Bootstrap& bootstrap, const WorldOptions& options) {
  std::vector<Hello> hellos;
  for (const std::string& bytes : bootstrap.AllGather(Pack(options))) {
    hellos.push_back(Unpack(bytes));
  }
  CheckProblems(hellos);
  CheckSettings(hellos);

  Roster roster;
  roster.nonce = hellos[0].nonce;
  std::map<std::string, int> machines;
  for (size_t rank = 0; rank < hellos.size(); ++rank) {
    const Hello& hello = hellos[rank];
    roster.ranks.push_back({static_cast<int>(rank), hello.host, hello.process});
    const int next = static_cast<int>(machines.size());
    roster.machine_of.push_back(machines.emplace(hello.host_id, next).first->second);
  }
  // Consecutive ranks of a machine share a virtual node, all nearly of one size.
  std::map<std::pair<int, int>, int> nodes;
  for (size_t rank = 0; rank < hellos.size(); ++rank) {
    const std::vector<int> neighbours = roster.MachineRanks(static_cast<int>(rank));
    const auto count = static_cast<int64_t>(neighbours.size());
    const int64_t parts = std::min<int64_t>(options.virtual_nodes, count);
    const int64_t index = std::find(neighbours.begin(), neighbours.end(), static_cast<int>(rank)) -
                          neighbours.begin();
    const std::pair<int, int> node{roster.machine_of[rank],
                                   static_cast<int>(index * parts / count)};
    const int next = static_cast<int>(nodes.size());
    roster.node_of.push_back(nodes.emplace(node, next).first->second);
  }
  return roster;
}

}  // namespace gradred::comm
