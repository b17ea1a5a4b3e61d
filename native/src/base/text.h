// Texts of messages and errors.
#pragma once

#include <string>
#include <vector>

namespace gradred {

// A UTF-8 text of at most `longest` bytes (3 or more). A longer one ends in "..."; no character is
// cut.
std::string Shortened(std::string text, size_t longest);

// "rank 3", "ranks 0, 1, 2 and 5 more".
std::string RanksText(const std::vector<int>& ranks);

}  // namespace gradred
