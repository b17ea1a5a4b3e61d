#include "comm/job_notes.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <utility>

namespace gradred::comm {
namespace {

constexpr char kEnded[] = "rank-", kFailed[] = "failed-";

std::string FailureName(int rank, int opening) {
  return kFailed + std::to_string(rank) + "-" + std::to_string(opening);
}

}  // namespace

JobNotes JobNotes::OfJob() {
  const char* folder = std::getenv("GRADRED_JOB_DIR");
  return JobNotes(folder == nullptr ? "" : folder);
}

std::string JobNotes::EndOf(int rank) const {
  std::string note;
  if (exist()) {
    std::ifstream file(folder_ + "/" + kEnded + std::to_string(rank));
    std::getline(file, note);
  }
  return note;
}

void JobNotes::TellFailure(int rank, int opening, const Status& cause) const {
  if (!exist() || rank < 0) return;
  const std::string path = folder_ + "/" + FailureName(rank, opening), draft = path + ".new";
  {
    std::ofstream file(draft);
    file << static_cast<int>(cause.kind()) << '\n' << cause.message();
  }
  std::rename(draft.c_str(), path.c_str());  // whole, or not there
}

std::optional<Status> JobNotes::FailureOf(int rank, int opening) const {
  if (!exist()) return std::nullopt;
  std::ifstream file(folder_ + "/" + FailureName(rank, opening));
  int kind = 0;
  if (!(file >> kind)) return std::nullopt;
  file.get();  // the end of the line
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  return Status(static_cast<Kind>(kind), text);
}

std::vector<int> JobNotes::Ranks() const {
  std::map<int, std::pair<time_t, long>> first;  // when its first note was written
  DIR* const folder = exist() ? opendir(folder_.c_str()) : nullptr;
  if (folder == nullptr) return {};
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    for (const std::string start : {kEnded, kFailed}) {
      struct stat note;
      if (name.compare(0, start.size(), start) != 0) continue;
      if (fstatat(dirfd(folder), name.c_str(), &note, 0) != 0) continue;  // renamed meanwhile
      const std::pair<time_t, long> written(note.st_mtim.tv_sec, note.st_mtim.tv_nsec);
      const auto at = first.emplace(std::atoi(name.c_str() + start.size()), written).first;
      at->second = std::min(at->second, written);
    }
  }
  closedir(folder);
  std::vector<int> ranks;
  for (const auto& [rank, written] : first) ranks.push_back(rank);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return first[a] < first[b]; });
  return ranks;
}

OpeningCheck CheckOf(JobNotes notes, Awaited awaited, int opening) {
  return
      [notes = std::move(notes), awaited = std::move(awaited), opening]() -> std::optional<Status> {
        for (const int rank : notes.Ranks()) {
          if (rank == awaited.rank) continue;
          const bool listed =
              awaited.ranks.empty() ||
              std::find(awaited.ranks.begin(), awaited.ranks.end(), rank) != awaited.ranks.end();
          const std::string who = "rank " + std::to_string(rank);
          const std::optional<Status> failure = notes.FailureOf(rank, opening);
          if (failure && listed && !awaited.some)
            return Status(failure->kind(), who + " could not open the job: " + failure->message());
          const std::string end = notes.EndOf(rank);
          if (end.empty() || (end == "exit code 0" && (!listed || awaited.some))) continue;
          return Status(Kind::kPeerLost, who + " ended before the job was open: " + end);
        }
        return std::nullopt;
      };
}

}  // namespace gradred::comm
