// What a union exchange carries: records that are the same set on all ranks afterwards. See Note
// [Union records].
#pragma once

#include <map>
#include <string>
#include <utility>

#include "base/digest.h"
#include "core/declaration.h"
#include "core/rank_set.h"

namespace gradred::core {

// Note [Union records]
// A blob is a set of records in one canonical order, so that merging in any order over any tree of
// ranks gives the same bytes, and merging twice changes nothing. Where two blobs bring the same key
// the record that compares lower stays; holders are united. Declarations travel whole: every rank
// knows the text of every agreed name, which is what lets a joined rank supply zeros and every rank
// write the same message.
struct Records {
  struct New {  // one signature of a name
    RankSet holders;
    std::string text;  // PutDeclaration of the lowest holder
  };
  struct Abandoned {
    int64_t batch;  // number of the batch: how many have ended before
    std::string reason;
    Kind kind;  // of the error
  };
  struct ShutDown {
    std::string reason;
    std::string completing;  // PutString of each domain whose batch that rank has submitted whole
  };

  std::map<std::pair<Digest, Digest>, New> news;               // by name and signature
  std::map<std::pair<std::string, int>, Abandoned> abandoned;  // by domain and rank
  std::map<int, int64_t> joins;                                // rank: the round in which it joined
  std::map<int, ShutDown> shutdowns;                           // by rank

  void AddNew(const Digest& name, const Digest& signature, int rank, const Declaration& text);

  void MergeFrom(Records other);
  bool empty() const;
  std::string Encode() const;
  static Records Decode(const std::string& blob);  // throws kTransportError
};

}  // namespace gradred::core
