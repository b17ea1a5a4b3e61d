// The timeline: rings, and files that can be read at any moment.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <random>
#include <thread>

#include "base/status.h"
#include "base/timeline.h"
#include "base/timeline_file.h"
#include "testing.h"

using namespace gradred;
using namespace gradred::timeline;

namespace {

struct TemporaryFile {
  TemporaryFile() : path("/tmp/gradred-timeline-" + std::to_string(getpid()) + ".json") {}
  ~TemporaryFile() { unlink(path.c_str()); }
  const std::string path;
};

std::string Read(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The rule for a file that was cut: whole lines count, the last one may be half.
std::vector<std::string> Events(const std::string& text) {
  std::vector<std::string> lines;
  size_t at = 0;
  for (size_t end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    std::string line = text.substr(at, end - at);
    while (!line.empty() && line.back() == ' ') line.pop_back();
    if (line.empty() || line == "[") continue;
    if (line.back() == ',') line.pop_back();
    lines.push_back(line);
  }
  return lines;
}

// Braces and brackets close, strings end, nothing follows.
bool IsObject(const std::string& line) {
  std::string open;
  bool in_string = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        in_string = false;
      else if (static_cast<unsigned char>(c) < 0x20)
        return false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') open += c;
    if (c == '}' || c == ']') {
      if (open.empty() || open.back() != (c == '}' ? '{' : '[')) return false;
      open.pop_back();
      if (open.empty() && i + 1 != line.size()) return false;
    }
  }
  return !line.empty() && line[0] == '{' && open.empty() && !in_string;
}

size_t Count(const std::vector<std::string>& lines, const std::string& part) {
  size_t n = 0;
  for (const std::string& line : lines) n += line.find(part) != std::string::npos;
  return n;
}

Options To(const std::string& path) {
  Options options;
  options.path = path;
  options.rank = 2;
  options.size = 3;
  options.host = "a \"host\"";
  options.origin = Now();
  return options;
}

DomainInfo TwoGroups(const std::string& name) {
  return {name, 0, {"kernel", "bi\"as\n"}, {{0, 1, 400}, {1, 2, 8}}};
}

Record At(Nanos begin) {
  Record record;
  record.begin = begin;
  record.name = "x";
  return record;
}

}  // namespace

TEST(ARingKeepsTheOrder) {
  Ring ring(8);
  std::vector<Record> out;
  for (int i = 0; i < 5; ++i) CHECK_EQ(ring.Push(At(i)), static_cast<uint64_t>(i));
  CHECK_EQ(ring.Take(&out), 0u);
  CHECK_EQ(ring.Push(At(5)), 0u);
  CHECK_EQ(ring.Take(&out), 0u);
  CHECK_EQ(out.size(), 6u);
  for (int i = 0; i < 6; ++i) CHECK_EQ(out[i].begin, i);
}

TEST(AFullRingLosesTheOldest) {
  Ring ring(8);
  std::vector<Record> out;
  for (int i = 0; i < 8; ++i) ring.Push(At(i));
  CHECK_EQ(ring.Take(&out), 0u);
  CHECK_EQ(out.size(), 8u);
  for (int i = 8; i < 31; ++i) ring.Push(At(i));
  out.clear();
  CHECK_EQ(ring.Take(&out), 15u);
  CHECK_EQ(out.size(), 8u);
  for (int i = 0; i < 8; ++i) CHECK_EQ(out[i].begin, 23 + i);
  ring.Push(At(31));
  ring.Skip();
  out.clear();
  CHECK_EQ(ring.Take(&out), 0u);
  CHECK(out.empty());
}

// The reader runs all the time and sees whole records, in order; none is counted twice.
TEST(AReaderBesideTheWriterSeesWholeRecords) {
  constexpr int kRecords = 200'000;
  Ring ring(64);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int i = 0; i < kRecords; ++i) {
      Record record = At(i);
      record.duration = ~record.begin;
      record.nbytes = 3 * record.begin;
      record.extra = i;
      ring.Push(record);
    }
    done = true;
  });
  int64_t next = 0;
  uint64_t lost = 0, taken = 0;
  std::string wrong;
  for (bool last = false; !last;) {
    last = done;
    std::vector<Record> out;
    lost += ring.Take(&out);
    taken += out.size();
    for (const Record& record : out) {
      if (record.begin < next || record.duration != ~record.begin ||
          record.nbytes != 3 * record.begin || record.extra != record.begin)
        wrong = std::to_string(record.begin) + " after " + std::to_string(next);
      next = record.begin + 1;
    }
  }
  writer.join();
  CHECK_EQ(wrong, "");
  CHECK_EQ(next, kRecords);
  CHECK_EQ(lost + taken, static_cast<uint64_t>(kRecords));
}

TEST(TextsAreEscapedAndCut) {
  CHECK_EQ(Escaped("a\"b\\c\n"), "a\\\"b\\\\c\\u000a");
  CHECK_EQ(Escaped("abcdef", 3), "abc...");
  CHECK_EQ(Escaped("ab\xc3\xa9", 3), "ab...");
}

TEST(EventsOfThreadsAndDomainsAreWritten) {
  TemporaryFile file;
  CHECK(!Recording());
  {
    Span span("before");
  }
  Start(To(file.path));
  CHECK_EQ(Path(), file.path);
  CHECK_ERROR(Start(To(file.path)), Kind::kInvalidArgument, "already");
  const auto plan = std::make_shared<int>(1), other = std::make_shared<int>(2);
  const Tag tag = BeginBatch("net", plan, [] { return TwoGroups("net"); });
  CHECK_EQ(BeginBatch("net", plan, [] { return DomainInfo{}; }).batch, tag.batch + 1);
  CHECK_EQ(BeginBatch("net", other, [] { return TwoGroups("net"); }).domain, tag.domain);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([tag] {
      NameThread("worker");
      for (int i = 0; i < 100; ++i) {
        Span outer("pack", 400, tag, 0, 1);
        Span inner("part");
        Span("brief", kNone, tag, 0, 1, kSecond);
      }
    });
  for (auto& thread : threads) thread.join();
  Record phase = At(Now());
  phase.domain = tag.domain;
  phase.batch = tag.batch;
  phase.group = 1;
  TakeSpent();
  {
    ChunkSpan span(Work::kSum, 8);
  }
  {
    ChunkSpan span(Work::kSum, 8);
  }
  phase.SetSpent(TakeSpent());
  CHECK(phase.duration == 0 && phase.nbytes > 0 && phase.extra == 0);
  phase.SetSpent({1500, 0, 7});
  for (const Shape shape : {Shape::kOpen, Shape::kClose}) {
    phase.shape = shape;
    Push(phase);
  }
  {
    Span span("lasting", kNone, tag, 0, 1, 1);
    const Nanos begin = Now();
    while (Now() == begin) {
    }
  }
  Stage stage;
  stage.Enter("chunk", 64);
  stage.Enter("more");
  stage.End();
  stage.End();
  Rounds rounds(3);
  rounds.Begin("round", 2);
  rounds.End(false);
  Note("stall", "rank 1 lacks \"x\"");
  Stop();
  CHECK(!Recording());
  {
    Span span("after");
  }

  const std::string text = Read(file.path);
  CHECK_EQ(text.back(), ']');
  CHECK_EQ(text.find("},\n]"), std::string::npos);
  const std::vector<std::string> lines = Events(text.substr(0, text.size() - 1));
  for (const std::string& line : lines) testing::Check(IsObject(line), line, __FILE__, __LINE__);
  CHECK_EQ(Count(lines, "\"pid\":3,"), lines.size());
  CHECK_EQ(Count(lines, "rank 2 on a \\\"host\\\""), 1u);
  CHECK_EQ(Count(lines, "\"name\":\"plan\",\"args\":{\"domain\":\"net\""), 1u);
  CHECK_EQ(Count(lines, "\"name\":\"pack\""), 300u);
  CHECK_EQ(Count(lines, "\"entry\":\"bi\\\"as\\u000a\",\"bytes\":400"), 300u);
  CHECK_EQ(Count(lines, "\"name\":\"part\"}"), 300u);
  CHECK(Count(lines, "\"name\":\"worker\"") >= 1);  // a lane goes from thread to thread
  CHECK_EQ(Count(lines, "\"name\":\"net: x\""), 2u);
  CHECK_EQ(Count(lines, "\"group\":1,\"pack_us\":1.500,\"unpack_us\":0.007}"), 1u);
  CHECK_EQ(Count(lines, "\"tid\":1003,"), 3u);
  CHECK_EQ(Count(lines, "\"name\":\"empty round\",\"args\":{\"words\":2}"), 1u);
  CHECK_EQ(Count(lines, "\"name\":\"stall\""), 1u);
  CHECK_EQ(Count(lines, "\"name\":\"chunk\",\"args\":{\"bytes\":64}"), 1u);
  CHECK_EQ(Count(lines, "\"cat\":\"stage\""), 4u);
  CHECK_EQ(Count(lines, "\"name\":\"lasting\""), 1u);
  CHECK_EQ(Count(lines, "\"events\":608,\"lost\":0"), 1u);
  CHECK_EQ(Count(lines, "before") + Count(lines, "after"), 0u);
}

// A file can be cut at every byte, and the lines before are whole.
TEST(ACutFileIsReadable) {
  TemporaryFile file;
  Start(To(file.path));
  const Tag tag = BeginBatch(std::string(300, '"'), std::make_shared<int>(1),
                             [] { return TwoGroups(std::string(300, '"')); });
  for (int i = 0; i < 200; ++i) Span span("pack", i, tag, 0, 1);
  Stop();
  const std::string text = Read(file.path);
  CHECK(text.size() > 4 * File::kPage);
  size_t before = 0;
  for (size_t cut = 0; cut <= text.size(); cut += cut % 4096 < 4000 ? 17 : 1) {
    const std::vector<std::string> lines = Events(text.substr(0, cut));
    CHECK(lines.size() >= before);
    before = lines.size();
    if (!lines.empty()) CHECK(IsObject(lines.back()));
  }
  CHECK_EQ(Count(Events(text), "\"name\":\"pack\""), 200u);
}

// No line crosses a page, so a process that is killed in a write leaves whole lines.
TEST(LinesDoNotCrossPages) {
  TemporaryFile file;
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  size_t added = 0;
  {
    File out(file.path);
    for (; added < 2000; ++added) {
      const size_t most = added % 50 ? 300 : File::kLongestLine - 8;
      out.Add("{\"a\":\"" + std::string(random() % most, 'x') + "\"}");
      if (random() % 5 == 0) CHECK(out.Flush());
    }
    CHECK(out.Close("{\"end\":1}"));
  }
  const std::string text = Read(file.path);
  for (size_t page = File::kPage; page < text.size(); page += File::kPage)
    CHECK_EQ(text[page - 1], '\n');
  CHECK_EQ(Events(text.substr(0, text.size() - 1)).size(), added + 1);
}

TEST(AKilledProcessLeavesAReadableFile) {
  TemporaryFile file;
  int pipe_ends[2];
  CHECK_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    Start(To(file.path));
    char one = 1;
    for (int i = 0;; ++i) {
      {
        Span span("work");
      }
      if (i == 100'000 && write(pipe_ends[1], &one, 1) != 1) _exit(1);
    }
  }
  char one = 0;
  CHECK_EQ(read(pipe_ends[0], &one, 1), 1);
  // Some of it is in the file by then, since a ring wakes the writer when it is half full.
  for (int i = 0; i < 200 && Read(file.path).size() < 100'000; ++i) usleep(10'000);
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  const std::string text = Read(file.path);
  CHECK_EQ(text.back(), '\n');
  const std::vector<std::string> lines = Events(text);
  for (const std::string& line : lines) testing::Check(IsObject(line), line, __FILE__, __LINE__);
  CHECK(Count(lines, "\"name\":\"work\"") > 100);
}

TEST(LostEventsAreSaid) {
  TemporaryFile file;
  Options options = To(file.path);
  options.ring_records = 4;
  Start(options);
  std::thread([] {
    NameThread("hasty");
    for (int i = 0; i < 100'000; ++i) Span span("work");
  }).join();
  Stop();
  const std::vector<std::string> lines = Events(Read(file.path));
  CHECK(Count(lines, "\"name\":\"lost events\"") > 0);
  CHECK(Count(lines, "\"lost\":0}") == 0);
}

TEST(AFileThatCannotBeWrittenIsNamed) {
  CHECK_ERROR(Start(To("/no/such/folder/x.json")), Kind::kInvalidArgument,
              "'/no/such/folder/x.json': No such file or directory");
  CHECK(!Recording());
  // The device is always full: recording ends by itself, and another can start.
  Start(To("/dev/full"));
  for (int i = 0; i < 500 && Recording(); ++i) usleep(10'000);
  CHECK(!Recording());
  TemporaryFile file;
  Start(To(file.path));
  Stop();
  CHECK_EQ(Read(file.path).back(), ']');
}

TEST(AForkedChildRecordsNothing) {
  TemporaryFile file;
  Start(To(file.path));
  const pid_t child = fork();
  if (child == 0) _exit(Recording() ? 1 : 0);
  int status = 0;
  waitpid(child, &status, 0);
  Stop();
  CHECK_EQ(status, 0);
}

int main(int argc, char** argv) { return testing::Main(argc, argv); }
