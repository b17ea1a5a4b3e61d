#include "engine/side_channel.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/bytes.h"
#include "base/text.h"

namespace gradred::engine {
namespace {

enum class What : uint8_t { kAbort, kQuestion, kAnswer };
constexpr size_t kLongestName = 2000;
constexpr size_t kMostLost = 256;  // ranks of a machine; a datagram holds them and a text

void PutDigest(Writer* out, const Digest& digest) {
  out->Put(digest.hi);
  out->Put(digest.lo);
}

Digest GetDigest(Reader* in) {
  Digest digest;
  digest.hi = in->Get<uint64_t>();
  digest.lo = in->Get<uint64_t>();
  return digest;
}

}  // namespace

// Every message starts with (what, root); messages to all are forwarded by whoever gets them.
void SideChannel::Spread(const std::string& bytes, int root, const std::set<int>& lost) {
  const int n = transport_.size();
  std::vector<int> ranks;  // from the root on, in a circle
  for (int i = 0; i < n; ++i)
    if (const int r = (root + i) % n; r == root || lost.count(r) == 0) ranks.push_back(r);
  const auto me = std::find(ranks.begin(), ranks.end(), transport_.rank());
  if (me == ranks.end()) return;
  const size_t index = me - ranks.begin();
  size_t reach = 1;
  while (reach <= index) reach *= 2;
  for (; index + reach < ranks.size(); reach *= 2) transport_.Post(ranks[index + reach], bytes);
}

void SideChannel::Announce(const AbortNotice& notice) {
  std::set<int> lost = notice.lost;
  while (lost.size() > kMostLost) lost.erase(std::prev(lost.end()));
  Writer out;
  out.Put(What::kAbort);
  out.Put<int32_t>(transport_.rank());
  out.Put<int32_t>(notice.origin);
  out.Put(notice.kind);
  out.PutString(Shortened(notice.text, kLongestNotice));
  out.Put<uint32_t>(lost.size());
  for (const int rank : lost) out.Put<int32_t>(rank);
  Spread(out.Take(), transport_.rank(), lost);
}

void SideChannel::Ask(const WhoLacks& question) {
  Writer out;
  out.Put(What::kQuestion);
  out.Put<int32_t>(question.asker);
  out.Put<int32_t>(question.set_id);
  out.Put<int32_t>(question.group);
  PutDigest(&out, question.domain);
  Spread(out.Take(), question.asker, {});
}

void SideChannel::Answer(int asker, const ILack& answer) {
  Writer out;
  out.Put(What::kAnswer);
  out.Put<int32_t>(answer.rank);
  out.Put<int32_t>(answer.set_id);
  out.Put<int32_t>(answer.group);
  PutDigest(&out, answer.domain);
  out.PutString(Shortened(answer.oldest, 1000));
  transport_.Post(asker, out.Take());
}

bool SideChannel::Poll(const Handlers& handlers) {
  bool any = false;
  transport_.Progress();
  comm::Message message;
  while (transport_.TakePosted(&message)) {
    any = true;
    Reader in(message.bytes);
    const What what = in.Get<What>();
    const int root = in.Get<int32_t>();
    if (what == What::kAbort) {
      AbortNotice notice;
      notice.origin = in.Get<int32_t>();
      notice.kind = in.Get<Kind>();
      notice.text = in.GetString();
      for (uint32_t left = in.Get<uint32_t>(); left > 0; --left)
        notice.lost.insert(in.Get<int32_t>());
      Spread(message.bytes, root, notice.lost);
      handlers.abort(notice);
    } else if (what == What::kQuestion) {
      Spread(message.bytes, root, {});
      WhoLacks question;
      question.asker = root;
      question.set_id = in.Get<int32_t>();
      question.group = in.Get<int32_t>();
      question.domain = GetDigest(&in);
      handlers.question(question);
    } else {
      ILack answer;
      answer.rank = root;
      answer.set_id = in.Get<int32_t>();
      answer.group = in.Get<int32_t>();
      answer.domain = GetDigest(&in);
      answer.oldest = in.GetString();
      handlers.answer(answer);
    }
  }
  return any;
}

}  // namespace gradred::engine
