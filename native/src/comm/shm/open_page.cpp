#include "comm/shm/open_page.h"

#include <algorithm>
#include <functional>
#include <string>

#include "base/bytes.h"
#include "base/status.h"

namespace gradred::comm::shm {
namespace {

// What a rank says after each step: how it went, and where its page is.
struct Report {
  Status status;
  MemoryKey key;
};

std::vector<Report> Exchange(Bootstrap& bootstrap, const std::function<MemoryKey()>& step) {
  Report mine;
  try {
    mine.key = step();
  } catch (...) {
    mine.status = CurrentException();
  }
  Writer writer;
  writer.Put(mine.status.kind());
  writer.PutString(mine.status.message());
  writer.PutString(std::string(reinterpret_cast<const char*>(&mine.key), sizeof mine.key));
  std::vector<Report> all;
  for (const std::string& bytes : bootstrap.AllGather(writer.Take())) {
    Reader reader(bytes);
    const Kind kind = reader.Get<Kind>();
    Report report{Status(kind, reader.GetString()), {}};
    const std::string key = reader.GetString();
    if (key.size() != sizeof report.key) {
      throw Error(Kind::kTransportError, "rank " + std::to_string(all.size()) +
                                             ": the key of its shared memory has " +
                                             std::to_string(key.size()) + " bytes, expected " +
                                             std::to_string(sizeof report.key));
    }
    std::memcpy(&report.key, key.data(), sizeof report.key);
    all.push_back(std::move(report));
  }
  return all;
}

// "" when every rank's step went well.
std::string FailureOf(const std::vector<Report>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].status.ok()) {
      return "rank " + std::to_string(rank) + ": " + reports[rank].status.message();
    }
  }
  return "";
}

}  // namespace

std::shared_ptr<Page> OpenPage(Bootstrap& bootstrap, const std::vector<int>& machine_of,
                               uint64_t nonce, const std::vector<Naming>& namings) {
  const int rank = bootstrap.rank();
  const int machine = machine_of[static_cast<size_t>(rank)];
  const auto mine = std::find(machine_of.begin(), machine_of.end(), machine);
  const auto maker = static_cast<size_t>(mine - machine_of.begin());
  const auto members = static_cast<int>(std::count(machine_of.begin(), machine_of.end(), machine));
  const bool make = static_cast<int>(maker) == rank;

  std::string failures;
  for (const Naming naming : namings) {
    std::shared_ptr<Page> page;
    const std::vector<Report> made = Exchange(bootstrap, [&] {
      if (make) {
        page = members == 1 ? Page::Private(nonce) : Page::Create(members, nonce, naming);
        return page->key();
      }
      return MemoryKey{};
    });
    std::string failure = FailureOf(made);
    if (failure.empty()) {
      failure = FailureOf(Exchange(bootstrap, [&] {
        if (!make) page = Page::Attach(made[maker].key);
        return MemoryKey{};
      }));
    }
    if (failure.empty()) return page;
    failures += (failures.empty() ? "" : "; then, with a name in /dev/shm: ") + failure;
  }
  throw Error(Kind::kUnsupported, "the ranks of a machine cannot share memory: " + failures);
}

}  // namespace gradred::comm::shm
