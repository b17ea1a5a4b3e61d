// A growing row of bits in 64-bit words, indexed by id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradred::core {

class Bitvector {
 public:
  static size_t WordsFor(int bits) { return (static_cast<size_t>(bits) + 63) / 64; }

  void Set(int bit) {
    if (word_of(bit) >= words_.size()) words_.resize(word_of(bit) + 1);
    words_[word_of(bit)] |= mask_of(bit);
  }
  void Clear(int bit) {
    if (word_of(bit) < words_.size()) words_[word_of(bit)] &= ~mask_of(bit);
  }
  bool Test(int bit) const {
    return word_of(bit) < words_.size() && (words_[word_of(bit)] & mask_of(bit)) != 0;
  }
  bool Any() const {
    for (const uint64_t word : words_)
      if (word != 0) return true;
    return false;
  }
  int Count() const {
    int n = 0;
    ForEach([&](int) { ++n; });
    return n;
  }
  // Word `index`, also beyond those that were ever set.
  uint64_t Word(size_t index) const { return index < words_.size() ? words_[index] : 0; }
  void SetWord(size_t index, uint64_t word) {
    if (index >= words_.size()) words_.resize(index + 1);
    words_[index] = word;
  }
  // fn(bit) for each set bit, ascending. Words added by fn are not visited.
  template <class Fn>
  void ForEach(Fn fn) const {
    for (size_t index = 0; index < words_.size(); ++index) {
      for (uint64_t rest = words_[index]; rest != 0; rest &= rest - 1)
        fn(static_cast<int>(index * 64) + __builtin_ctzll(rest));
    }
  }
  // The set bit that `skip` set bits precede, or -1.
  int Nth(int skip) const {
    for (size_t index = 0; index < words_.size(); ++index) {
      for (uint64_t rest = words_[index]; rest != 0; rest &= rest - 1)
        if (skip-- == 0) return static_cast<int>(index * 64) + __builtin_ctzll(rest);
    }
    return -1;
  }
  // Gives back the words at `bits` and above.
  void Shrink(int bits) {
    if (words_.size() > WordsFor(bits)) words_.resize(WordsFor(bits));
  }

 private:
  static size_t word_of(int bit) { return static_cast<size_t>(bit) / 64; }
  static uint64_t mask_of(int bit) { return uint64_t{1} << (bit % 64); }
  std::vector<uint64_t> words_;
};

}  // namespace gradred::core
