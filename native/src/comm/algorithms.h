// Which algorithm serves which size: a table that can be printed and overridden.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradred::comm {

enum class Algorithm : uint8_t {
  kRecursiveDoubling,  // allreduce
  kRecursiveHalving,   // allreduce: halving, then doubling
  kPairwise,           // allreduce and allgather
  kRing,               // allreduce; the order of sums depends on the size of the message
  kBruck,              // allgather
  kNative,             // allreduce of the library behind the transport, in an order of its own
};
const char* AlgorithmName(Algorithm algorithm);  // as in the setting: "recursive_doubling"
// Whether the sums have the order of Note [Order of summation], whatever the sizes.
bool IsReproducible(Algorithm algorithm);

// From `from_nbytes` of the whole result on, until another row of the collective begins.
struct AlgorithmRow {
  const char* collective = "";  // "allreduce", "allgather"
  int64_t from_nbytes = 0;
  Algorithm algorithm = Algorithm::kRecursiveDoubling;
  const char* why = "";
};

// All reproducible.
std::vector<AlgorithmRow> DefaultAlgorithms(int size);

// "allreduce:0=recursive_doubling,32768=recursive_halving;allgather:0=bruck": collectives by ';',
// rows by ',' with ascending bytes from 0 on. Empty: no rows. Throws kInvalidArgument naming what
// is wrong, and an algorithm that is not reproducible where `reproducible` asks for one.
std::vector<AlgorithmRow> ParseAlgorithms(const std::string& text, bool reproducible);

// The default rows of `size` ranks, or in their place, by collective, those of `rows`.
std::vector<AlgorithmRow> MergeAlgorithms(int size, const std::vector<AlgorithmRow>& rows);

// Of the rows that apply, the one with the largest from_nbytes.
Algorithm Choose(const std::vector<AlgorithmRow>& rows, const char* collective, int64_t nbytes);

}  // namespace gradred::comm
