#include "sparse/product.h"

#include <algorithm>

namespace gradred::sparse {
namespace {

template <class T>
T* ScratchOf(diff::Channel& channel, int64_t count) {
  return static_cast<T*>(channel.Scratch(count * static_cast<int64_t>(sizeof(T))));
}

// Lists of positions that ranks exchange: what is sent is read from `from`, what is received is
// added to `to`; where `sum` is false it replaces.
template <class T>
struct Lists {
  std::vector<int> peers;
  std::vector<const std::vector<int64_t>*> sent, received;
  bool sum;

  void Run(diff::Channel& channel, const T* from, T* to) const {
    const auto total = [](const auto& lists) {
      int64_t count = 0;
      for (const auto* list : lists) count += static_cast<int64_t>(list->size());
      return count;
    };
    const int own = channel.rank();
    T* const in = ScratchOf<T>(channel, total(received));
    T* out = ScratchOf<T>(channel, total(sent));
    T* at = in;
    for (size_t i = 0; i < peers.size(); ++i) {
      const auto count = static_cast<int64_t>(received[i]->size());
      if (peers[i] != own && count > 0) channel.Recv(peers[i], at, count * sizeof(T));
      at += count;
    }
    at = in;
    for (size_t i = 0; i < peers.size(); ++i) {
      T* const begin = out;
      for (const int64_t k : *sent[i]) *out++ = from[k];
      if (peers[i] == own)
        std::copy(begin, out, at);
      else if (out > begin)
        channel.Send(peers[i], begin, (out - begin) * sizeof(T));
      at += received[i]->size();
    }
    channel.WaitForMessages();
    at = in;
    for (size_t i = 0; i < peers.size(); ++i) {
      for (const int64_t k : *received[i]) to[k] = sum ? to[k] + *at++ : *at++;
    }
  }
};

}  // namespace

template <class T>
Products<T>::Products(const Pattern& pattern, diff::Channel& channel)
    : p_(pattern), channel_(channel) {
  int64_t borders = 0;
  for (const Pattern::Neighbour& n : pattern.neighbours())
    borders += static_cast<int64_t>(n.sent.size());
  borders_ = ScratchOf<T>(channel, borders);
  ghosts_ = ScratchOf<T>(channel, static_cast<int64_t>(pattern.ghost_columns().size()));
}

template <class T>
void Products<T>::StartHalo(const T* x) {
  for (const Pattern::Neighbour& n : p_.neighbours()) {
    if (n.ghosts > 0) channel_.Recv(n.peer, ghosts_ + n.ghost_begin, n.ghosts * sizeof(T));
  }
  T* out = borders_;
  for (const Pattern::Neighbour& n : p_.neighbours()) {
    T* const begin = out;
    for (const int32_t c : n.sent) *out++ = x[c];
    if (out > begin) channel_.Send(n.peer, begin, (out - begin) * sizeof(T));
  }
}

template <class T>
void Products<T>::Multiply(const T* values, const T* x, T* y) {
  StartHalo(x);
  const int64_t* const starts = p_.starts().data();
  const int32_t* const columns = p_.local_columns().data();
  for (const int32_t i : p_.inner_rows()) {  // while the messages are under way
    T sum = 0;
    for (int64_t k = starts[i]; k < starts[i + 1]; ++k) sum += values[k] * x[columns[k]];
    y[i] = sum;
  }
  channel_.WaitForMessages();
  const int64_t own = p_.columns();
  for (const int32_t i : p_.border_rows()) {
    T sum = 0;
    for (int64_t k = starts[i]; k < starts[i + 1]; ++k) {
      const int64_t c = columns[k];
      sum += values[k] * (c < own ? x[c] : ghosts_[c - own]);
    }
    y[i] = sum;
  }
}

template <class T>
void Products<T>::MultiplyTransposed(const T* values, const T* y, T* x) {
  const int64_t own = p_.columns();
  std::fill_n(ghosts_, p_.ghost_columns().size(), T{0});
  std::fill_n(x, own, T{0});
  const auto add_rows = [&](const std::vector<int32_t>& rows) {
    for (const int32_t i : rows) {
      for (int64_t k = p_.starts()[i]; k < p_.starts()[i + 1]; ++k) {
        const int64_t c = p_.local_columns()[k];
        (c < own ? x[c] : ghosts_[c - own]) += values[k] * y[i];
      }
    }
  };
  add_rows(p_.border_rows());
  T* in = borders_;
  for (const Pattern::Neighbour& n : p_.neighbours()) {
    if (!n.sent.empty()) channel_.Recv(n.peer, in, n.sent.size() * sizeof(T));
    in += n.sent.size();
  }
  for (const Pattern::Neighbour& n : p_.neighbours()) {
    if (n.ghosts > 0) channel_.Send(n.peer, ghosts_ + n.ghost_begin, n.ghosts * sizeof(T));
  }
  add_rows(p_.inner_rows());  // while the messages are under way
  channel_.WaitForMessages();
  in = borders_;
  for (const Pattern::Neighbour& n : p_.neighbours())
    for (const int32_t c : n.sent) x[c] += *in++;
}

template <class T>
void Products<T>::Outer(const T* y, const T* x, T* values) {
  StartHalo(x);
  channel_.WaitForMessages();
  const int64_t own = p_.columns();
  for (int64_t i = 0; i < p_.rows(); ++i) {
    for (int64_t k = p_.starts()[i]; k < p_.starts()[i + 1]; ++k) {
      const int64_t c = p_.local_columns()[k];
      values[k] = y[i] * (c < own ? x[c] : ghosts_[c - own]);
    }
  }
}

template <class T>
void Assemble(const Pattern& pattern, diff::Channel& channel, const T* triplets, T* values) {
  Lists<T> lists{{}, {}, {}, true};
  for (const Pattern::Contribution& c : pattern.contributions()) {
    lists.peers.push_back(c.peer);
    lists.sent.push_back(&c.sent);
    lists.received.push_back(&c.slots);
  }
  std::fill_n(values, pattern.nonzeros(), T{0});
  lists.Run(channel, triplets, values);
}

template <class T>
void AssembleAdjoint(const Pattern& pattern, diff::Channel& channel, const T* values, T* triplets) {
  Lists<T> lists{{}, {}, {}, false};
  for (const Pattern::Contribution& c : pattern.contributions()) {
    lists.peers.push_back(c.peer);
    lists.sent.push_back(&c.slots);
    lists.received.push_back(&c.sent);
  }
  lists.Run(channel, values, triplets);
}

template class Products<float>;
template class Products<double>;
template void Assemble(const Pattern&, diff::Channel&, const float*, float*);
template void Assemble(const Pattern&, diff::Channel&, const double*, double*);
template void AssembleAdjoint(const Pattern&, diff::Channel&, const float*, float*);
template void AssembleAdjoint(const Pattern&, diff::Channel&, const double*, double*);

}  // namespace gradred::sparse
