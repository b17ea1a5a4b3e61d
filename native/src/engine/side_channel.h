// Aborts and stall questions travel here, never by rounds. Used by the control thread.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "base/digest.h"
#include "comm/transport.h"

namespace gradred::engine {

constexpr size_t kLongestNotice = 2000;  // bytes of the text of a notice: a datagram holds it

struct AbortNotice {
  int origin = 0;  // rank that saw the fault
  Kind kind = Kind::kInternal;
  std::string text;    // longer ones arrive shortened
  std::set<int> lost;  // ranks that are known to be gone, and are left out of the tree
};

// Names of domains travel as digests where they can: a datagram need not hold them.
inline Digest NameDigest(const std::string& domain) { return DigestOf(domain, 0); }

struct WhoLacks {
  int asker = 0, set_id = 0, group = 0;
  Digest domain;
};

struct ILack {
  int rank = 0, set_id = 0, group = 0;
  Digest domain;
  std::string oldest;  // what that rank waits for itself, with its age; empty: nothing
};

// Its functions throw what the transport throws.
class SideChannel {
 public:
  explicit SideChannel(comm::Transport& transport) : transport_(transport) {}

  // To all ranks, along a binomial tree from here: log2(ranks) sends a rank.
  void Announce(const AbortNotice& notice);
  void Ask(const WhoLacks& question);
  void Answer(int asker, const ILack& answer);

  struct Handlers {
    std::function<void(const AbortNotice&)> abort;
    std::function<void(const WhoLacks&)> question;
    std::function<void(const ILack&)> answer;
  };
  // Takes what has arrived and forwards it down the tree. True if something came.
  bool Poll(const Handlers& handlers);

 private:
  void Spread(const std::string& bytes, int root, const std::set<int>& lost);
  comm::Transport& transport_;
};

}  // namespace gradred::engine
