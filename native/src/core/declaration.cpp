#include "core/declaration.h"

#include <algorithm>

namespace gradred::core {
namespace {

bool Valid(const Declaration& declaration) {
  int before = 0;
  for (const int end : declaration.group_ends) {
    if (end <= before) return false;
    before = end;
  }
  return before > 0 && static_cast<size_t>(before) == declaration.entries.size();
}

std::string Cuts(const Declaration& declaration) {
  std::string text = "groups end at";
  for (const int end : declaration.group_ends) text += " " + std::to_string(end);
  return text;
}

// The first entry that not all variants have alike, or -1 where one list is the beginning of
// another.
int FirstDifference(const std::vector<Variant>& variants, size_t common) {
  for (size_t i = 0; i < common; ++i) {
    for (const Variant& variant : variants) {
      if (variant.declaration->entries[i].signature !=
          variants[0].declaration->entries[i].signature)
        return static_cast<int>(i);
    }
  }
  return -1;
}

std::string Quoted(const std::string& text) { return "'" + text + "'"; }

}  // namespace

std::string NameInSet(const std::string& name, const NegotiatorOptions& options) {
  return Quoted(name) + (options.set.empty() ? "" : " in " + options.set);
}

void CheckDeclaration(const Declaration& declaration) {
  if (!Valid(declaration))
    throw Error(Kind::kInternal, "domain '" + declaration.name + "' declares " +
                                     std::to_string(declaration.entries.size()) +
                                     " entries, but its " + Cuts(declaration));
}

bool SameSignature(const Declaration& a, const Declaration& b) {
  if (&a == &b) return true;
  return a.group_ends == b.group_ends &&
         std::equal(
             a.entries.begin(), a.entries.end(), b.entries.begin(), b.entries.end(),
             [](const EntryText& x, const EntryText& y) { return x.signature == y.signature; });
}

Digest SignatureDigest(const Declaration& declaration, uint64_t key) {
  Writer out;
  out.Put<uint64_t>(declaration.entries.size());
  for (const EntryText& entry : declaration.entries) out.PutString(entry.signature);
  for (const int end : declaration.group_ends) out.Put<int32_t>(end);
  return DigestOf(out.Take(), key);
}

void PutDeclaration(const Declaration& declaration, Writer* out) {
  out->PutString(declaration.name);
  out->Put<uint32_t>(declaration.entries.size());
  for (const EntryText& entry : declaration.entries) {
    out->PutString(entry.signature);
    out->PutString(entry.label);
  }
  out->Put<uint32_t>(declaration.group_ends.size());
  for (const int end : declaration.group_ends) out->Put<int32_t>(end);
  out->PutString(declaration.payload);
}

Declaration GetDeclaration(Reader* in) {
  Declaration declaration;
  declaration.name = in->GetString();
  for (uint32_t left = in->Get<uint32_t>(); left > 0; --left) {
    std::string signature = in->GetString();
    declaration.entries.push_back({std::move(signature), in->GetString()});
  }
  for (uint32_t left = in->Get<uint32_t>(); left > 0; --left)
    declaration.group_ends.push_back(in->Get<int32_t>());
  declaration.payload = in->GetString();
  if (!Valid(declaration))
    throw Error(Kind::kTransportError,
                "a control message holds a broken declaration of '" + declaration.name + "'");
  return declaration;
}

std::string DescribeMismatch(const std::string& name, const std::vector<Variant>& variants,
                             const NegotiatorOptions& options) {
  size_t fewest = SIZE_MAX, most = 0;
  for (const Variant& variant : variants) {
    fewest = std::min(fewest, variant.declaration->entries.size());
    most = std::max(most, variant.declaration->entries.size());
  }
  const int differs = FirstDifference(variants, fewest);
  const bool counts_differ = fewest != most;

  std::string text = NameInSet(name, options);
  if (differs >= 0)
    text += ", entry " + std::to_string(differs) + " (" +
            Quoted(variants[0].declaration->entries[differs].label) + ")";
  text += counts_differ  ? ": ranks declare different numbers of entries"
          : differs >= 0 ? ": ranks declare different tensors"
                         : ": ranks cut the entries into different groups";
  for (size_t side = 0; side < variants.size(); ++side) {
    const Declaration& declaration = *variants[side].declaration;
    text += (side == 0 ? ": " : "; ") + variants[side].holders.Describe(options.world_ranks) + ": ";
    if (differs >= 0) {
      const EntryText& entry = declaration.entries[differs];
      text += entry.signature;
      if (entry.label != variants[0].declaration->entries[differs].label)
        text += " (" + Quoted(entry.label) + ")";
    }
    if (counts_differ)
      text +=
          (differs >= 0 ? " of " : "") + std::to_string(declaration.entries.size()) + " entries";
    if (differs < 0 && !counts_differ) text += Cuts(declaration);
  }
  return text + ". Every rank must bring the same tensors in the same order under one name";
}

}  // namespace gradred::core
