#include "comm/algorithms.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "base/status.h"
#include "comm/patterns.h"

namespace gradred::comm {
namespace {

struct Entry {
  Algorithm algorithm;
  const char* name;
  bool allreduce, allgather, reproducible;
};
constexpr Entry kEntries[] = {
    {Algorithm::kRecursiveDoubling, "recursive_doubling", true, false, true},
    {Algorithm::kRecursiveHalving, "recursive_halving", true, false, true},
    {Algorithm::kPairwise, "pairwise", true, true, true},
    {Algorithm::kRing, "ring", true, false, false},
    {Algorithm::kBruck, "bruck", false, true, true},
    {Algorithm::kNative, "native", true, false, false},
};

const Entry& EntryOf(Algorithm algorithm) {
  return *std::find_if(std::begin(kEntries), std::end(kEntries),
                       [&](const Entry& e) { return e.algorithm == algorithm; });
}

std::vector<std::string> SplitText(const std::string& text, char by) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == by)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

[[noreturn]] void Refuse(const std::string& text, const std::string& what) {
  throw Error(Kind::kInvalidArgument, "GRADRED_ALGORITHMS='" + text + "': " + what +
                                          ", as in "
                                          "'allreduce:0=recursive_doubling,32768=pairwise'");
}

int64_t ParseBytes(const std::string& text, const std::string& word) {
  const bool digits =
      !word.empty() && word.size() <= 15 &&
      std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!digits) Refuse(text, "'" + word + "': expected a number of bytes");
  return std::stoll(word);
}

Algorithm ParseName(const std::string& text, const char* collective, const std::string& word,
                    bool reproducible) {
  const bool gather = std::strcmp(collective, "allgather") == 0;
  std::string names;
  for (const Entry& e : kEntries) {
    if (!(gather ? e.allgather : e.allreduce)) continue;
    if (word == e.name) {
      if (reproducible && !e.reproducible) {
        Refuse(text, word +
                         " adds in an order that changes with the sizes, which needs "
                         "GRADRED_REPRODUCIBLE=0");
      }
      return e.algorithm;
    }
    names += (names.empty() ? "" : ", ") + std::string(e.name);
  }
  Refuse(text, "'" + word + "': expected, for " + collective + ", one of " + names);
}

}  // namespace

const char* AlgorithmName(Algorithm algorithm) { return EntryOf(algorithm).name; }
bool IsReproducible(Algorithm algorithm) { return EntryOf(algorithm).reproducible; }

// Note [Where algorithms change]
// Measured on 2 and 4 ranks over TCP on the loopback interface and over MPI's shared memory
// (benchmarks/algorithms.py, benchmarks/results/algorithms.json): of the reproducible ones
// recursive doubling was the fastest at 256 KB in all four, and halving, or pairwise, at 1 MB. With
// more ranks doubling sends more than halving does, log2(size) times the data against twice, so the
// change comes earlier; that, and the gathers' number, follow from counting and are not measured.
std::vector<AlgorithmRow> DefaultAlgorithms(int size) {
  constexpr int kMeasured = 4, kManyMessages = 32;
  constexpr int64_t kShortGather = 64 << 10;
  const int64_t short_reduce = size <= kMeasured ? 512 << 10 : 128 << 10;
  std::vector<AlgorithmRow> rows = {
      {"allreduce", 0, Algorithm::kRecursiveDoubling, "latency: log2(size) exchanges"},
      {"allgather", 0, Algorithm::kBruck, "latency: log2(size) exchanges"},
      {"allgather", kShortGather, Algorithm::kPairwise, "bandwidth: every byte moves once"},
  };
  if (LargestPowerOfTwo(size) == size || size > kManyMessages) {
    rows.push_back({"allreduce", short_reduce, Algorithm::kRecursiveHalving,
                    "bandwidth: twice the data in 2 log2(size) exchanges"});
  } else {
    rows.push_back({"allreduce", short_reduce, Algorithm::kPairwise,
                    "bandwidth: twice the data without a fold, as size is no power of two"});
  }
  return rows;
}

std::vector<AlgorithmRow> ParseAlgorithms(const std::string& text, bool reproducible) {
  std::vector<AlgorithmRow> rows;
  if (text.empty()) return rows;
  std::vector<std::string> seen;
  for (const std::string& part : SplitText(text, ';')) {
    const size_t colon = part.find(':');
    const std::string name = part.substr(0, colon);
    if (colon == std::string::npos || (name != "allreduce" && name != "allgather"))
      Refuse(text, "'" + part + "': expected allreduce: or allgather: and rows");
    if (std::find(seen.begin(), seen.end(), name) != seen.end())
      Refuse(text, name + " comes twice");
    seen.push_back(name);
    const char* collective = name == "allreduce" ? "allreduce" : "allgather";
    int64_t before = -1;
    for (const std::string& row : SplitText(part.substr(colon + 1), ',')) {
      const size_t equals = row.find('=');
      if (equals == std::string::npos) Refuse(text, "'" + row + "': expected BYTES=ALGORITHM");
      const int64_t from = ParseBytes(text, row.substr(0, equals));
      if (before < 0 ? from != 0 : from <= before) {
        Refuse(text, "'" + row + "': expected bytes that begin at 0 and ascend");
      }
      before = from;
      rows.push_back({collective, from,
                      ParseName(text, collective, row.substr(equals + 1), reproducible),
                      "set by GRADRED_ALGORITHMS"});
    }
  }
  return rows;
}

std::vector<AlgorithmRow> MergeAlgorithms(int size, const std::vector<AlgorithmRow>& rows) {
  std::vector<AlgorithmRow> merged = DefaultAlgorithms(size);
  for (const AlgorithmRow& row : rows) {
    const auto replaced = [&](const AlgorithmRow& r) {
      return std::strcmp(r.collective, row.collective) == 0;
    };
    merged.erase(std::remove_if(merged.begin(), merged.end(), replaced), merged.end());
  }
  merged.insert(merged.end(), rows.begin(), rows.end());
  return merged;
}

Algorithm Choose(const std::vector<AlgorithmRow>& rows, const char* collective, int64_t nbytes) {
  const AlgorithmRow* chosen = nullptr;
  for (const AlgorithmRow& row : rows) {
    if (std::strcmp(row.collective, collective) != 0 || row.from_nbytes > nbytes) continue;
    if (!chosen || row.from_nbytes >= chosen->from_nbytes) chosen = &row;
  }
  return chosen ? chosen->algorithm : Algorithm::kPairwise;
}

}  // namespace gradred::comm
