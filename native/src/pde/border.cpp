#include "pde/border.h"

#include <algorithm>

namespace gradred::pde {
namespace {

int64_t CountOf(const std::vector<Strip>& strips) {
  int64_t count = 0;
  for (const Strip& strip : strips) count += strip.count;
  return count;
}

template <class T, class Move>
void ForEachValue(const std::vector<Strip>& strips, T* const* fields, T* packed, Move move) {
  for (const Strip& strip : strips) {
    T* value = fields[strip.field] + strip.offset;
    for (int64_t i = 0; i < strip.count; ++i, value += strip.stride) move(*value, *packed++);
  }
}

}  // namespace

template <class T>
Border<T>::Border(const Block& block, const std::vector<Side>& sides) {
  for (const Side& side : sides) {
    const int peer = block.neighbours[side.side];
    if (peer < 0) continue;
    for (const Strip& strip : side.send) {
      fields_.resize(std::max<size_t>(fields_.size(), strip.field + 1));
    }
    lines_.push_back({peer, side.send, side.recv, CountOf(side.send), CountOf(side.recv)});
  }
}

template <class T>
void Border<T>::Attach(Messages* messages) {
  messages_ = messages;
  for (Line& line : lines_) {
    line.out = static_cast<T*>(messages->Scratch(line.out_count * sizeof(T)));
    line.in = static_cast<T*>(messages->Scratch(line.in_count * sizeof(T)));
  }
}

template <class T>
void Border<T>::Start(T* const* fields) {
  if (lines_.empty()) return;
  const Nanos begun = Now();
  std::copy_n(fields, fields_.size(), fields_.begin());
  for (const Line& line : lines_) messages_->Recv(line.peer, line.in, line.in_count * sizeof(T));
  for (const Line& line : lines_) {
    ForEachValue(line.send, fields_.data(), line.out, [](T& own, T& out) { out = own; });
    const int64_t nbytes = line.out_count * sizeof(T);
    messages_->Send(line.peer, line.out, nbytes);
    messages_sent_ += 1;
    nbytes_sent_ += nbytes;
  }
  time_ += Now() - begun;
}

template <class T>
void Border<T>::Finish() {
  if (lines_.empty()) return;
  const Nanos begun = Now();
  messages_->WaitForMessages();
  for (const Line& line : lines_) {
    ForEachValue(line.recv, fields_.data(), line.in, [](T& ghost, T& in) { ghost = in; });
  }
  time_ += Now() - begun;
}

template class Border<float>;
template class Border<double>;

}  // namespace gradred::pde
