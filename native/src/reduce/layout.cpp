#include "reduce/layout.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "reduce/float_mode.h"
#include "reduce/kernels.h"

namespace gradred::reduce {
namespace {

std::string Describe(const Section& s) {
  return std::to_string(s.count) + " x " + DTypeName(s.dtype) + " at byte " +
         std::to_string(s.offset) + " (" + ReduceOpName(s.op) + ")";
}

int64_t EndOf(const Section& s) { return s.offset + s.count * DTypeSize(s.dtype); }

// fn(offset, count, section) for what each section has in `range`: its bytes' start and its
// elements' number.
template <class Fn>
void ForEachIn(const std::vector<Section>& sections, Range range, Fn fn) {
  // Sections are in order and do not overlap, so their ends are in order too.
  auto s = std::partition_point(sections.begin(), sections.end(),
                                [&](const Section& x) { return EndOf(x) <= range.begin; });
  for (; s != sections.end() && s->offset < range.end; ++s) {
    const int64_t begin = std::max(range.begin, s->offset);
    const int64_t end = std::min(range.end, EndOf(*s));
    if (begin < end) fn(begin, (end - begin) / DTypeSize(s->dtype), *s);
  }
}

ReduceLoop LoopOf(const Section& s) {
  return BestLoops().reduce[static_cast<int>(s.op)][static_cast<int>(s.dtype)];
}

}  // namespace

const char* ReduceOpName(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum",     "min",     "max",
                                                  "product", "average", "bit-and"};
  return kNames[static_cast<int>(op)];
}

std::vector<Range> Split(int64_t nbytes, int parts) {
  const int64_t units = (nbytes + kAlign - 1) / kAlign;
  const int64_t each = units / parts, more = units % parts;  // the first `more` parts have one more
  std::vector<Range> ranges(static_cast<size_t>(parts));
  int64_t at = 0;
  for (int i = 0; i < parts; ++i) {
    const int64_t begin = at;
    at += (each + (i < more)) * kAlign;
    ranges[static_cast<size_t>(i)] = {std::min(begin, nbytes), std::min(at, nbytes)};
  }
  return ranges;
}

Layout::Layout(std::vector<Section> sections) : sections_(std::move(sections)) {
  std::stable_sort(sections_.begin(), sections_.end(), [](const Section& a, const Section& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.count < b.count;
  });
  const Section* previous = nullptr;
  for (const Section& s : sections_) {
    if (s.offset < 0 || s.offset % kAlign != 0 || s.count < 0 ||
        s.count > (INT64_MAX - kAlign - s.offset) / DTypeSize(s.dtype))
      throw Error(Kind::kInvalidArgument,
                  "section " + Describe(s) +
                      ": expected a count from 0 and an offset that is a multiple of " +
                      std::to_string(kAlign) + " bytes");
    if (!LoopOf(s))
      throw Error(Kind::kInvalidArgument, std::string("section ") + Describe(s) + ": " +
                                              DTypeName(s.dtype) + " has no " + ReduceOpName(s.op));
    if (previous && s.offset < EndOf(*previous))
      throw Error(Kind::kInvalidArgument,
                  "sections overlap: " + Describe(*previous) + " and " + Describe(s));
    nbytes_ = std::max(nbytes_, AlignUp(EndOf(s)));
    previous = &s;
  }
}

void Layout::ReduceNode(void* out, const void* const* ins, int n, Range range,
                        float node_scale) const {
  const IeeeMode ieee_mode;
  ForEachIn(sections_, range, [&](int64_t offset, int64_t count, const Section& s) {
    LoopOf(s)(out, ins, n, offset, count, s.op == ReduceOp::kAverage ? node_scale : 1.0f);
  });
}

void Layout::ReduceHop(void* out, const void* a, const void* b, Range range) const {
  const void* const ins[2] = {a, b};
  ReduceNode(out, ins, 2, range, 0.5f);
}

void Layout::HopAlone(void* data, Range range) const {
  const void* const ins[1] = {data};
  ReduceNode(data, ins, 1, range, 0.5f);
}

}  // namespace gradred::reduce
