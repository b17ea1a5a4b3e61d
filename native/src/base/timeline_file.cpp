#include "base/timeline_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "base/status.h"

namespace gradred::timeline {
namespace {

constexpr int kRoundsLane = 1000;  // and the process set's number
constexpr size_t kMostGroups = 100;

int Open(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0)
    throw Error(Kind::kInvalidArgument,
                "the timeline cannot be written to '" + path + "': " + strerror(errno));
  return fd;
}

}  // namespace

std::string Escaped(const std::string& text, size_t most) {
  static const char* const kHex = "0123456789abcdef";
  size_t end = std::min(text.size(), most);
  // Not in the middle of a character of UTF-8.
  while (end < text.size() && end > 0 && (text[end] & 0xc0) == 0x80) --end;
  std::string out;
  for (size_t i = 0; i < end; ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += text[i];
    } else if (c < 0x20 || c == 0x7f) {
      out += "\\u00";
      out += kHex[c >> 4];
      out += kHex[c & 15];
    } else {
      out += text[i];
    }
  }
  if (end < text.size()) out += "...";
  return out;
}

File::File(const std::string& path) : fd_(Open(path)), page_(kPage) {
  page_[0] = '[';
  page_[1] = '\n';
  filled_ = 2;
}

File::~File() { close(fd_); }

bool File::WritePage(size_t nbytes) {
  while (written_ < nbytes && !failed_) {
    const ssize_t n = write(fd_, page_.data() + written_, nbytes - written_);
    if (n > 0)
      written_ += n;
    else if (n == 0 || errno != EINTR)
      failed_ = true;
  }
  return !failed_;
}

void File::Add(std::string_view line) {
  if (line.size() > kLongestLine) return;
  if (filled_ + line.size() + 2 > kPage) {
    std::fill(page_.begin() + filled_, page_.end(), ' ');
    if (filled_ < kPage) page_.back() = '\n';
    WritePage(kPage);
    filled_ = written_ = 0;
  }
  filled_ = std::copy(line.begin(), line.end(), page_.begin() + filled_) - page_.begin();
  page_[filled_++] = ',';
  page_[filled_++] = '\n';
}

bool File::Flush() { return WritePage(filled_); }

bool File::Close(std::string_view line) {
  Add(line);
  page_[filled_ - 2] = '\n';
  page_[filled_ - 1] = ']';  // the very last byte: some readers refuse even blanks behind it
  return Flush();
}

void Lines::PutMicroseconds(Nanos value) {
  value = std::max<Nanos>(value, 0);
  PutInt(value / 1000);
  const int64_t part = value % 1000;
  const char decimals[] = {'.', static_cast<char>('0' + part / 100),
                           static_cast<char>('0' + part / 10 % 10),
                           static_cast<char>('0' + part % 10)};
  Put({decimals, sizeof(decimals)});
}

void Lines::Finish() { file_->Add(line_.text()); }

// Viewers keep process 0 for the idle task, so a rank is process rank + 1.
void Lines::Start(char phase, int lane, Nanos at) {
  line_.Clear();
  Put("{\"ph\":\"");
  Put({&phase, 1});
  Put("\",\"pid\":");
  PutInt(options_.rank + 1);
  Put(",\"tid\":");
  PutInt(lane);
  Put(",\"ts\":");
  PutMicroseconds(at + options_.clock_offset - options_.origin);
}

void Lines::Header() {
  const std::string pid = std::to_string(options_.rank + 1);
  const std::string rank = std::to_string(options_.rank);
  const std::string start = "{\"ph\":\"M\",\"pid\":" + pid + ",\"name\":\"";
  file_->Add(start + "process_name\",\"args\":{\"name\":\"rank " + rank + " on " +
             Escaped(options_.host) + "\"}}");
  file_->Add(start + "process_sort_index\",\"args\":{\"sort_index\":" + rank + "}}");
  file_->Add(start + "gradred_timeline\",\"args\":{\"format\":1,\"rank\":" + rank +
             ",\"size\":" + std::to_string(options_.size) + ",\"host\":\"" +
             Escaped(options_.host) + "\",\"pid\":" + std::to_string(getpid()) +
             ",\"origin_ns\":" + std::to_string(options_.origin) +
             ",\"clock_offset_ns\":" + std::to_string(options_.clock_offset) +
             ",\"clock_uncertainty_ns\":" + std::to_string(options_.clock_uncertainty) + "}}");
}

void Lines::Thread(int lane, const std::string& name) {
  const std::string start = "{\"ph\":\"M\",\"pid\":" + std::to_string(options_.rank + 1) +
                            ",\"tid\":" + std::to_string(lane) + ",\"name\":\"";
  file_->Add(start + "thread_name\",\"args\":{\"name\":\"" + name + "\"}}");
  file_->Add(start + "thread_sort_index\",\"args\":{\"sort_index\":" + std::to_string(lane) + "}}");
}

const Lines::Names& Lines::NamesOf(uint32_t id, const DomainInfo& info) {
  const auto [at, fresh] = names_.try_emplace(id);
  if (fresh) {
    at->second.domain = Escaped(info.name);
    for (const std::string& label : info.labels) at->second.labels.push_back(Escaped(label));
  }
  return at->second;
}

void Lines::Domain(uint32_t id, const DomainInfo& info, Nanos at) {
  Start('i', 0, at);
  Put(",\"s\":\"p\",\"name\":\"plan\",\"args\":{\"domain\":\"");
  Put(NamesOf(id, info).domain);
  Put("\",\"set\":");
  PutInt(info.set);
  Put(",\"entries\":");
  PutInt(static_cast<int64_t>(info.labels.size()));
  int64_t nbytes = 0;
  for (const GroupInfo& group : info.groups) nbytes += group.nbytes;
  Put(",\"bytes\":");
  PutInt(nbytes);
  Put(",\"groups\":");
  PutInt(static_cast<int64_t>(info.groups.size()));
  Put(",\"group_bytes\":[");  // of the first ones
  for (size_t i = 0; i < std::min(info.groups.size(), kMostGroups); ++i) {
    if (i > 0) Put(",");
    PutInt(info.groups[i].nbytes);
  }
  Put("]}}");
  Finish();
}

void Lines::Event(const Record& record, int lane, uint32_t domain_id, const DomainInfo* domain) {
  const bool phase = record.shape == Shape::kOpen || record.shape == Shape::kClose;
  // Of a batch or a stage that began before the recording.
  if (record.domain != 0 ? !domain : phase && record.batch <= stages_before_) return;
  const Names* names = domain ? &NamesOf(domain_id, *domain) : nullptr;
  switch (record.shape) {
    case Shape::kRound:
      lane = kRoundsLane + record.set;
      if (sets_.insert(record.set).second)
        Thread(lane, "rounds of process set " + std::to_string(record.set));
      [[fallthrough]];
    case Shape::kSpan:
      Start('X', lane, record.begin);
      Put(",\"dur\":");
      PutMicroseconds(record.duration);
      break;
    case Shape::kInstant:
      Start('i', lane, record.begin);
      Put(",\"s\":\"t\"");
      break;
    case Shape::kMark:
      Start('i', lane, record.begin);
      Put(",\"s\":\"p\"");
      break;
    case Shape::kOpen:
      Start('b', lane, record.begin);
      break;
    case Shape::kClose:
      Start('e', lane, record.begin);
      break;
  }
  if (phase) {
    const int64_t number = (static_cast<int64_t>(record.domain & 0x7fff) << 48) |
                           (static_cast<int64_t>(record.batch) << 16) |
                           static_cast<int64_t>(record.group + 1);
    Put(!names                  ? ",\"cat\":\"stage\",\"id2\":{\"local\":\"0x"
        : record.group == kNone ? ",\"cat\":\"step\",\"id2\":{\"local\":\"0x"
                                : ",\"cat\":\"group\",\"id2\":{\"local\":\"0x");
    line_.PutInt(number, 16);
    Put("\"}");
  }
  Put(",\"name\":\"");
  if (phase && names) {
    // Viewers make a track of each name of a phase: those of a domain stand together.
    Put(names->domain);
    Put(": ");
  }
  Put(record.name);
  Put("\"");
  const char* before = ",\"args\":{";
  const auto number = [&](std::string_view key, int64_t value) {
    Put(before);
    Put(key);
    PutInt(value);
    before = ",";
  };
  if (names && !phase) {
    Put(before);
    Put("\"domain\":\"");
    Put(names->domain);
    Put("\"");
    before = ",";
  }
  if (names && record.batch > 0) number("\"batch\":", record.batch);
  if (record.group != kNone) number("\"group\":", record.group);
  if (names && record.entry != kNone && record.entry < static_cast<int32_t>(names->labels.size())) {
    Put(before);
    Put("\"entry\":\"");
    Put(names->labels[record.entry]);
    Put("\"");
    before = ",";
  }
  if (record.shape == Shape::kClose) {
    static constexpr const char* kKeys[kWorks] = {"\"pack_us\":", "\"sum_us\":", "\"unpack_us\":"};
    const auto spent = record.spent();
    for (size_t i = 0; i < kWorks; ++i) {
      if (spent[i] <= 0) continue;
      Put(before);
      Put(kKeys[i]);
      PutMicroseconds(spent[i]);
      before = ",";
    }
  } else if (record.nbytes != kNone) {
    number("\"bytes\":", record.nbytes);
  }
  if (record.value != kNone) number("\"words\":", record.value);
  Put(before[1] == '\0' ? "}}" : "}");
  Finish();
}

void Lines::Text(const char* name, const std::string& text, Nanos at) {
  Start('i', 0, at);
  Put(",\"s\":\"p\",\"name\":\"");
  Put(name);
  Put("\",\"args\":{\"text\":\"");
  Put(Escaped(text, 600));
  Put("\"}}");
  Finish();
}

void Lines::Lost(uint64_t records, int lane, Nanos at) {
  Start('i', lane, at);
  Put(",\"s\":\"t\",\"name\":\"lost events\",\"args\":{\"events\":");
  PutInt(static_cast<int64_t>(records));
  Put("}}");
  Finish();
}

std::string Lines::Last(uint64_t events, uint64_t lost) {
  return "{\"ph\":\"M\",\"pid\":" + std::to_string(options_.rank + 1) +
         ",\"name\":\"gradred_end\",\"args\":{\"events\":" + std::to_string(events) +
         ",\"lost\":" + std::to_string(lost) + "}}";
}

}  // namespace gradred::timeline
