#include "core/round_words.h"

#include "base/status.h"

namespace gradred::core {
namespace {

// Bits of the status word.
constexpr uint64_t kNobodyDeclares = 1, kNobodyHasRecords = 2, kNobodyJoined = 4;
constexpr uint64_t kEverybodyJoinIdle = 8, kEverybodyShutDownIdle = 16;
constexpr int kCheckShift = 8, kCheckInverseShift = 32;
constexpr uint64_t kCheckMask = 0xffffff;

size_t WordsFor(int ids) { return 1 + 2 * Bitvector::WordsFor(ids) + 4; }

}  // namespace

std::vector<uint64_t> EncodeRound(const RoundStatus& status, bool offer_all,
                                  const Bitvector& withheld, const Bitvector& held, int ids) {
  std::vector<uint64_t> words;
  words.reserve(WordsFor(ids));
  const uint64_t check = status.check & kCheckMask;
  words.push_back(
      (status.declares ? 0 : kNobodyDeclares) | (status.has_records ? 0 : kNobodyHasRecords) |
      (status.joined ? 0 : kNobodyJoined) | (status.join_idle ? kEverybodyJoinIdle : 0) |
      (status.shut_down_idle ? kEverybodyShutDownIdle : 0) | check << kCheckShift |
      (~check & kCheckMask) << kCheckInverseShift);
  const size_t half = Bitvector::WordsFor(ids);
  for (size_t i = 0; i < half; ++i) words.push_back(offer_all ? ~withheld.Word(i) : held.Word(i));
  for (size_t i = 0; i < half; ++i) words.push_back(~held.Word(i));
  words.push_back(status.declared.hi);
  words.push_back(status.declared.lo);
  words.push_back(~status.declared.hi);
  words.push_back(~status.declared.lo);
  return words;
}

RoundResult DecodeRound(const std::vector<uint64_t>& words, int ids, uint32_t check) {
  if (words.size() != WordsFor(ids))
    throw Error(Kind::kTransportError, "a round brought " + std::to_string(words.size()) +
                                           " words, expected " + std::to_string(WordsFor(ids)));
  const uint64_t status = words[0];
  const uint64_t mine = check & kCheckMask;
  if ((status >> kCheckShift & kCheckMask) != mine ||
      (status >> kCheckInverseShift & kCheckMask) != (~mine & kCheckMask))
    throw Error(Kind::kInternal, "expected the digest " + std::to_string(mine) +
                                     " of the table of agreed names on all ranks, but the tables "
                                     "differ; this is a fault of gradred, please report it");
  RoundResult result;
  result.anybody_declares = !(status & kNobodyDeclares);
  result.anybody_has_records = !(status & kNobodyHasRecords);
  result.anybody_joined = !(status & kNobodyJoined);
  result.everybody_join_idle = status & kEverybodyJoinIdle;
  result.everybody_shut_down_idle = status & kEverybodyShutDownIdle;
  const size_t half = Bitvector::WordsFor(ids);
  for (size_t i = 0; i < half; ++i) {
    const uint64_t everywhere = words[1 + i], somewhere = ~words[1 + half + i];
    result.agreed.SetWord(i, everywhere & somewhere);
    result.pending.SetWord(i, ~everywhere & somewhere);
  }
  const uint64_t* declared = &words[1 + 2 * half];
  result.declared_alike =
      result.anybody_declares && declared[0] == ~declared[2] && declared[1] == ~declared[3];
  return result;
}

}  // namespace gradred::core
