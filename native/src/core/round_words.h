// The words of a round. See Note [Round words].
#pragma once

#include <cstdint>
#include <vector>

#include "base/digest.h"
#include "core/bitvector.h"

namespace gradred::core {

// Note [Round words]
// [status, S bits, not-S bits, D, not-D], one AND over the ranks. A condition X of single ranks
// travels as a bit that is set where X is false (the AND says "nobody") or where it is true (the
// AND says "everybody"). A value travels twice, plain and inverted: the two ANDs are complements if
// and only if all ranks sent the same value. That compares D, the digest of what a rank newly
// declares, and a check of all that was agreed before, so that ranks whose state has come apart say
// so instead of reducing different tensors. The number of words follows from the number of ids,
// which is agreed.
struct RoundStatus {
  bool declares = false;     // has declarations that are not agreed on: D is not zero
  bool has_records = false;  // brings an abandoned batch, its join or its shutdown to a union
  bool joined = false;
  bool join_idle = false;       // joined or shut down, and no batch pending
  bool shut_down_idle = false;  // shut down, and no batch pending
  uint32_t check = 0;           // 24 bits of the table's digest
  Digest declared;              // D
};

// `offered`: S. `held`: what makes a bit complete somewhere; S without it is a joined rank's "as
// far as I am concerned".
std::vector<uint64_t> EncodeRound(const RoundStatus& status, bool offer_all,
                                  const Bitvector& withheld, const Bitvector& held, int ids);

struct RoundResult {
  bool anybody_declares = false, anybody_has_records = false, anybody_joined = false;
  bool everybody_join_idle = false, everybody_shut_down_idle = false;
  bool declared_alike = false;  // everybody sent the same D, and it is not zero
  Bitvector agreed;             // complete everywhere, held by at least one
  Bitvector pending;            // complete somewhere, not everywhere
};

// Throws kTransportError for words that cannot come from `ids` ids, kInternal when the ranks'
// tables differ.
RoundResult DecodeRound(const std::vector<uint64_t>& words, int ids, uint32_t check);

}  // namespace gradred::core
