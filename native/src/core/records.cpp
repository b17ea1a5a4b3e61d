#include "core/records.h"

#include <algorithm>
#include <tuple>

#include "base/bytes.h"

namespace gradred::core {
namespace {

void Unite(Records::New* mine, Records::New other) {
  const int lowest = mine->holders.lowest(), other_lowest = other.holders.lowest();
  if (other_lowest < lowest || (other_lowest == lowest && other.text < mine->text))
    mine->text = std::move(other.text);
  mine->holders.Add(other.holders);
}

void Unite(Records::Abandoned* mine, Records::Abandoned other) {
  if (std::tie(other.batch, other.reason, other.kind) <
      std::tie(mine->batch, mine->reason, mine->kind))
    *mine = std::move(other);
}

void Unite(int64_t* mine, int64_t other) { *mine = std::min(*mine, other); }

void Unite(Records::ShutDown* mine, Records::ShutDown other) {
  if (std::tie(other.reason, other.completing) < std::tie(mine->reason, mine->completing))
    *mine = std::move(other);
}

template <class Map>
void MergeMap(Map* mine, Map* other) {
  for (auto& [key, record] : *other) {
    const auto [at, fresh] = mine->emplace(key, record);
    if (!fresh) Unite(&at->second, std::move(record));
  }
}

// Reads `count` records; their keys ascend, or the blob is not canonical.
template <class Map, class ReadFn>
void ReadMap(Reader* in, Map* map, ReadFn read) {
  for (uint32_t left = in->Get<uint32_t>(); left > 0; --left) {
    auto entry = read();
    if (!map->empty() && !(map->rbegin()->first < entry.first))
      throw Error(Kind::kTransportError, "the records of a control message are out of order");
    map->emplace_hint(map->end(), std::move(entry));
  }
}

void PutDigest(const Digest& digest, Writer* out) {
  out->Put(digest.hi);
  out->Put(digest.lo);
}

Digest GetDigest(Reader* in) {
  const uint64_t hi = in->Get<uint64_t>();
  return {hi, in->Get<uint64_t>()};
}

}  // namespace

void Records::AddNew(const Digest& name, const Digest& signature, int rank,
                     const Declaration& text) {
  Writer out;
  PutDeclaration(text, &out);
  news[{name, signature}] = {RankSet(rank), out.Take()};
}

void Records::MergeFrom(Records other) {
  MergeMap(&news, &other.news);
  MergeMap(&abandoned, &other.abandoned);
  MergeMap(&joins, &other.joins);
  MergeMap(&shutdowns, &other.shutdowns);
}

bool Records::empty() const {
  return news.empty() && abandoned.empty() && joins.empty() && shutdowns.empty();
}

std::string Records::Encode() const {
  Writer out;
  out.Put<uint32_t>(news.size());
  for (const auto& [key, record] : news) {
    PutDigest(key.first, &out);
    PutDigest(key.second, &out);
    record.holders.Put(&out);
    out.PutString(record.text);
  }
  out.Put<uint32_t>(abandoned.size());
  for (const auto& [key, record] : abandoned) {
    out.PutString(key.first);
    out.Put<int32_t>(key.second);
    out.Put(record.batch);
    out.Put(record.kind);
    out.PutString(record.reason);
  }
  out.Put<uint32_t>(joins.size());
  for (const auto& [rank, round] : joins) {
    out.Put<int32_t>(rank);
    out.Put(round);
  }
  out.Put<uint32_t>(shutdowns.size());
  for (const auto& [rank, record] : shutdowns) {
    out.Put<int32_t>(rank);
    out.PutString(record.reason);
    out.PutString(record.completing);
  }
  return out.Take();
}

Records Records::Decode(const std::string& blob) {
  Reader in(blob);
  Records records;
  ReadMap(&in, &records.news, [&] {
    const Digest name = GetDigest(&in), signature = GetDigest(&in);
    RankSet holders = RankSet::Get(&in);
    return std::make_pair(std::make_pair(name, signature), New{std::move(holders), in.GetString()});
  });
  ReadMap(&in, &records.abandoned, [&] {
    std::string domain = in.GetString();
    const int rank = in.Get<int32_t>();
    const int64_t batch = in.Get<int64_t>();
    const Kind kind = in.Get<Kind>();
    return std::make_pair(std::make_pair(std::move(domain), rank),
                          Abandoned{batch, in.GetString(), kind});
  });
  ReadMap(&in, &records.joins, [&] {
    const int rank = in.Get<int32_t>();
    return std::make_pair(rank, in.Get<int64_t>());
  });
  ReadMap(&in, &records.shutdowns, [&] {
    const int rank = in.Get<int32_t>();
    std::string reason = in.GetString();
    return std::make_pair(rank, ShutDown{std::move(reason), in.GetString()});
  });
  if (!in.AtEnd()) throw Error(Kind::kTransportError, "a control message is too long");
  return records;
}

}  // namespace gradred::core
