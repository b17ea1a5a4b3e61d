#include "core/rank_set.h"

#include <algorithm>

namespace gradred::core {
namespace {

constexpr size_t kRangesShown = 8;

void Append(std::pair<int, int> range, std::vector<std::pair<int, int>>* ranges) {
  if (!ranges->empty() && range.first <= ranges->back().second + 1)
    ranges->back().second = std::max(ranges->back().second, range.second);
  else
    ranges->push_back(range);
}

}  // namespace

void RankSet::Add(const RankSet& other) {
  std::vector<std::pair<int, int>> both(ranges_.size() + other.ranges_.size()), merged;
  std::merge(ranges_.begin(), ranges_.end(), other.ranges_.begin(), other.ranges_.end(),
             both.begin());
  for (const auto& range : both) Append(range, &merged);
  ranges_ = std::move(merged);
}

void RankSet::Put(Writer* out) const {
  out->Put<uint32_t>(ranges_.size());
  for (const auto& [first, last] : ranges_) {
    out->Put<int32_t>(first);
    out->Put<int32_t>(last);
  }
}

RankSet RankSet::Get(Reader* in) {
  RankSet set;
  int64_t before = -2;
  for (uint32_t left = in->Get<uint32_t>(); left > 0; --left) {
    const int first = in->Get<int32_t>(), last = in->Get<int32_t>();
    if (first < 0 || first <= before + 1 || last < first)
      throw Error(Kind::kTransportError, "a control message holds a broken list of ranks");
    set.ranges_.emplace_back(first, last);
    before = last;
  }
  if (set.empty()) throw Error(Kind::kTransportError, "a control message names no rank");
  return set;
}

std::string RankSet::Describe(const std::vector<int>& world_ranks) const {
  std::vector<int> ranks;
  for (const auto& [first, last] : ranges_) {
    for (int rank = first; rank <= last; ++rank)
      ranks.push_back(static_cast<size_t>(rank) < world_ranks.size() ? world_ranks[rank] : rank);
  }
  std::sort(ranks.begin(), ranks.end());
  std::vector<std::pair<int, int>> shown;
  for (const int rank : ranks) Append({rank, rank}, &shown);
  std::string text = "rank ";
  for (size_t i = 0; i < shown.size(); ++i) {
    if (i == kRangesShown) return text + ", ... (" + std::to_string(ranks.size()) + " ranks)";
    if (i > 0) text += ", ";
    text += std::to_string(shown[i].first);
    if (shown[i].second > shown[i].first) text += "-" + std::to_string(shown[i].second);
  }
  return text;
}

}  // namespace gradred::core
