// The file of a timeline: lines of JSON, readable at any moment.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/timeline.h"

namespace gradred::timeline {

// `text` inside the quotes of a JSON string, cut to `most` bytes of it.
std::string Escaped(const std::string& text, size_t most = 200);

// A JSON array of one event a line, each with a comma behind it. Viewers take an array without its
// end. A write never crosses a page: the kernel looks for a deadly signal between pages only, so a
// killed process leaves whole lines. Where a line does not fit in what is left of a page, blanks
// fill it.
class File {
 public:
  // Throws kInvalidArgument with path and reason.
  explicit File(const std::string& path);
  ~File();

  // `line`: a JSON object without newline, at most kLongestLine bytes.
  void Add(std::string_view line);
  // Hands over what was added. False, with errno set, when it could not be written.
  bool Flush();
  // Ends the array by `line`.
  bool Close(std::string_view line);

  static constexpr size_t kPage = 4096, kLongestLine = kPage - 2;

 private:
  bool WritePage(size_t nbytes);
  const int fd_;
  std::vector<char> page_;
  size_t filled_ = 0;   // of the page
  size_t written_ = 0;  // of those
  bool failed_ = false;
};

// A line that is being made. What is too long for a line stays so, and File leaves it out.
class Line {
 public:
  void Clear() { size_ = 0; }
  void Put(std::string_view text) {
    const size_t n = std::min(text.size(), sizeof(chars_) - size_);
    std::memcpy(chars_ + size_, text.data(), n);
    size_ += n;
  }
  void PutInt(int64_t value, int base = 10) {
    const std::to_chars_result end =
        std::to_chars(chars_ + size_, chars_ + sizeof(chars_), value, base);
    size_ = end.ec == std::errc() ? static_cast<size_t>(end.ptr - chars_) : sizeof(chars_);
  }
  std::string_view text() const { return {chars_, size_}; }

 private:
  char chars_[File::kPage];
  size_t size_ = 0;
};

// Turns records into lines. Belongs to the thread that writes.
class Lines {
 public:
  // `stages_before`: how many stages began before the recording.
  Lines(const Options& options, File* file, uint32_t stages_before)
      : options_(options), file_(file), stages_before_(stages_before) {}
  void Header();
  void Thread(int lane, const std::string& name);
  void Domain(uint32_t id, const DomainInfo& info, Nanos at);
  void Event(const Record& record, int lane, uint32_t domain_id, const DomainInfo* domain);
  void Text(const char* name, const std::string& text, Nanos at);
  void Lost(uint64_t records, int lane, Nanos at);
  std::string Last(uint64_t events, uint64_t lost);

 private:
  struct Names {  // escaped, of a domain
    std::string domain;
    std::vector<std::string> labels;
  };
  const Names& NamesOf(uint32_t id, const DomainInfo& info);
  // {"ph":"X","pid":1,"tid":2,"ts":3.000
  void Start(char phase, int lane, Nanos at);
  void Put(std::string_view text) { line_.Put(text); }
  void PutInt(int64_t value) { line_.PutInt(value); }
  void PutMicroseconds(Nanos value);
  void Finish();
  const Options options_;
  File* const file_;
  const uint32_t stages_before_;
  Line line_;
  std::unordered_map<uint32_t, Names> names_;  // by id
  std::unordered_set<int> sets_;               // that have a lane
};

}  // namespace gradred::timeline
