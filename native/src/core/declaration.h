// What ranks compare of a declaration, how it travels, and how a disagreement reads.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/digest.h"
#include "core/negotiator.h"
#include "core/rank_set.h"

namespace gradred::core {

// Throws kInternal for a declaration without groups or with cuts that do not ascend to the number
// of entries.
void CheckDeclaration(const Declaration& declaration);

// What must agree: the entries' signatures and the cuts. Labels and payload may differ.
bool SameSignature(const Declaration& a, const Declaration& b);
Digest SignatureDigest(const Declaration& declaration, uint64_t key);

void PutDeclaration(const Declaration& declaration, Writer* out);
Declaration GetDeclaration(Reader* in);  // kTransportError for one that CheckDeclaration refuses

// "'loss' in process set 3", for messages.
std::string NameInSet(const std::string& name, const NegotiatorOptions& options);

// One opinion on what a name stands for, and who holds it.
struct Variant {
  RankSet holders;
  DeclarationPtr declaration;
};
// The same text wherever it is called with the same variants (two or more): the domain, the first
// thing that differs, and what the ranks on each side declared.
std::string DescribeMismatch(const std::string& name, const std::vector<Variant>& variants,
                             const NegotiatorOptions& options);

}  // namespace gradred::core
