#include "instances.h"

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "domains.h"

namespace gradred::tf {
namespace {

bool IsDigit(char c) { return '0' <= c && c <= '9'; }

// The digits of `text` from `at` on, which moves behind them, without leading zeros.
std::string Digits(const std::string& text, size_t* at) {
  while (*at + 1 < text.size() && text[*at] == '0' && IsDigit(text[*at + 1])) ++*at;
  const size_t begin = *at;
  while (*at < text.size() && IsDigit(text[*at])) ++*at;
  return text.substr(begin, *at - begin);
}

// Digits count by their value.
struct ByPath {
  bool operator()(const std::string& a, const std::string& b) const {
    size_t i = 0, j = 0;
    while (i < a.size() && j < b.size()) {
      if (IsDigit(a[i]) && IsDigit(b[j])) {
        const std::string m = Digits(a, &i), n = Digits(b, &j);
        if (m.size() != n.size()) return m.size() < n.size();
        if (m != n) return m < n;
      } else if (a[i] != b[j]) {
        return a[i] < b[j];
      } else {
        ++i, ++j;
      }
    }
    const bool ended = i == a.size(), other_ended = j == b.size();
    return ended != other_ended ? ended : a < b;  // the latter for leading zeros
  }
};

}  // namespace

struct Instance::Graph {
  struct Copies {
    std::set<std::string, ByPath> fresh;  // paths that are not numbered yet
    std::map<std::string, int> numbers;
  };

  std::mutex mutex;
  bool ended = false;
  std::set<std::string> nodes;
  std::map<std::string, Copies> domains;

  // The one that this thread makes kernels of.
  static std::weak_ptr<Graph>& Here() {
    thread_local std::weak_ptr<Graph> here;
    return here;
  }

  // Whether the node may be of this graph, which then has it.
  bool Take(const std::string& node) {
    std::lock_guard<std::mutex> lock(mutex);
    return !ended && nodes.insert(node).second;
  }
};

// Graphs of sessions, each of one domain, by the key of its spec.
struct Instance::Sessions {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Graph>> graphs;

  static Sessions& The() {
    static auto* sessions = new Sessions;
    return *sessions;
  }
};

Instance::Instance(TF_OpKernelConstruction* construction, std::string key) : key_(std::move(key)) {
  if (IsOfEager(key_)) {
    number_ = 0;
    return;
  }
  const TF_StringView name = TheApi().OpKernelConstruction_GetName(construction);
  const std::string node(name.data, name.len);
  const size_t slash = node.rfind('/');
  path_ = slash == std::string::npos ? "" : node.substr(0, slash);
  if (IsOfSession(key_)) {
    std::lock_guard<std::mutex> lock(Sessions::The().mutex);
    std::shared_ptr<Graph>& graph = Sessions::The().graphs[key_];
    if (graph == nullptr) graph = std::make_shared<Graph>();
    graph_ = graph;
  } else {
    graph_ = Graph::Here().lock();
    if (graph_ == nullptr || !graph_->Take(node)) {
      Graph::Here() = graph_ = std::make_shared<Graph>();
      graph_->Take(node);
    }
  }
  std::lock_guard<std::mutex> lock(graph_->mutex);
  Graph::Copies& copies = graph_->domains[DomainOf(key_)];
  if (copies.numbers.count(path_) == 0) copies.fresh.insert(path_);
}

Instance::~Instance() {
  if (graph_ == nullptr || !IsOfSession(key_)) return;
  std::lock_guard<std::mutex> lock(Sessions::The().mutex);
  if (graph_.use_count() == 2) Sessions::The().graphs.erase(key_);  // this and the table's
  graph_.reset();
}

int Instance::Number() const {
  const int known = number_.load();
  if (known >= 0) return known;
  std::lock_guard<std::mutex> lock(graph_->mutex);
  graph_->ended = true;
  Graph::Copies& copies = graph_->domains.at(DomainOf(key_));
  for (const std::string& path : copies.fresh)
    copies.numbers.emplace(path, static_cast<int>(copies.numbers.size()));
  copies.fresh.clear();
  return number_ = copies.numbers.at(path_);
}

std::string Instance::Suffix() const {
  const int number = Number();
  return number == 0 ? "" : "+" + std::to_string(number);
}

void Instance::EndGraph() { Graph::Here().reset(); }

}  // namespace gradred::tf
