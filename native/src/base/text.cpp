#include "base/text.h"

#include <algorithm>

namespace gradred {

std::string Shortened(std::string text, size_t longest) {
  if (text.size() <= longest) return text;
  const auto continues = [&text](size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  size_t kept = longest - 3;
  while (kept > 0 && continues(kept)) --kept;
  text.resize(kept);
  return text + "...";
}

std::string RanksText(const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

}  // namespace gradred
