// The process's engine as functions.
#include "engine/engine.h"

#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <unordered_map>

#include "bindings.h"
#include "diff/context.h"
#include "engine/plan_report.h"

namespace gradred::bindings {
namespace {

// The enumerator whose name is `text`, out of the first `count`.
template <class Enum>
Enum FromName(const std::string& text, const char* (*name)(Enum), int count, const char* what) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const Enum value = static_cast<Enum>(i);
    if (text == name(value)) return value;
    known += (i > 0 ? ", " : "") + std::string(name(value));
  }
  throw Error(Kind::kInvalidArgument,
              std::string(what) + " '" + text + "': expected one of " + known);
}

engine::EntrySpec MakeEntry(const py::dict& d) {
  engine::EntrySpec e;
  e.label = d["label"].cast<std::string>();
  e.op = FromName<engine::Op>(d["op"].cast<std::string>(), &engine::OpName,
                              static_cast<int>(engine::Op::kBarrier) + 1, "operation");
  e.reduce_op =
      FromName<reduce::ReduceOp>(d["reduce_op"].cast<std::string>(), &reduce::ReduceOpName,
                                 static_cast<int>(reduce::ReduceOp::kAverage) + 1, "reduction");
  e.dtype = FromName<DType>(d["dtype"].cast<std::string>(), &DTypeName, kDTypeCount, "dtype");
  e.wire = FromName<DType>(d["wire"].cast<std::string>(), &DTypeName, kDTypeCount, "wire dtype");
  e.shape = d["shape"].cast<engine::Shape>();
  e.prescale = d["prescale"].cast<double>();
  e.postscale = d["postscale"].cast<double>();
  e.root = d["root"].cast<int>();
  return e;
}

py::dict MetricsDict(const engine::Metrics& m) {
  py::dict d;
  d["batches"] = m.batches;
  d["groups"] = m.groups;
  d["entries"] = m.entries;
  d["bytes"] = m.bytes;
  d["rounds"] = m.rounds;
  d["empty_rounds"] = m.empty_rounds;
  d["unions"] = m.unions;
  d["non_finite"] = m.non_finite;
  d["saturated"] = m.saturated;
  d["partly_absent"] = m.partly_absent;
  d["abandoned"] = m.abandoned;
  d["plan_changes"] = m.plan_changes;
  d["network_bytes"] = m.network_bytes;
  d["wait_s"] = m.wait_s;
  d["last_wait_s"] = m.last_wait_s;
  d["communication_s"] = m.communication_s;
  d["packed_early"] = m.packed_early;
  d["fusion_buffer_nbytes"] = m.fusion_buffer_nbytes;
  d["pool_nbytes"] = m.pool_nbytes;
  d["pool_fresh"] = m.pool_fresh;
  d["pool_reused"] = m.pool_reused;
  return d;
}

py::list TimesList(const std::vector<core::GroupTimes>& times) {
  py::list list;
  for (const core::GroupTimes& group : times) list.append(py::make_tuple(group.start, group.end));
  return list;
}

py::list PlansList(const std::vector<engine::PlanReport>& reports) {
  py::list list;
  for (const engine::PlanReport& report : reports) {
    py::dict d;
    d["domain"] = report.domain;
    d["process_set"] = report.process_set;
    d["planned"] = report.planned;
    d["labels"] = report.labels;
    d["counts"] = report.counts;
    d["nbytes"] = report.nbytes;
    d["order"] = report.arrangement->order;
    d["group_ends"] = report.arrangement->group_ends;
    d["batches"] = report.batches;
    d["changes"] = report.changes;
    d["ready_ns"] = report.ready;
    d["predicted_ns"] = TimesList(report.predicted.times);
    d["measured_ns"] = TimesList(report.measured);
    d["cost_nbytes"] = report.sizes;
    d["cost_ns"] = report.costs;
    d["round_ns"] = report.round;
    list.append(std::move(d));
  }
  return list;
}

Kind KindFromName(const std::string& name) {
  for (int k = 0; k <= static_cast<int>(Kind::kInternal); ++k) {
    if (name == KindName(static_cast<Kind>(k))) return static_cast<Kind>(k);
  }
  throw Error(Kind::kInvalidArgument, "kind of error '" + name + "'");
}

// Lets go of the engine. Its destructor joins threads, so not under the GIL.
void Drop() {
  py::gil_scoped_release release;
  diff::CloseContexts("gradred has failed or was shut down");
  engine::SetGlobal(nullptr);
}

void Shutdown(const std::string& reason) {
  WaitInterruptible(StartOnThread([engine = engine::Global(), reason] {
    diff::CloseContexts(reason);  // their threads use the world
    engine->Shutdown(reason);
  }));
  Drop();
}

// Runs a collective call of the engine. One that KeyboardInterrupt has ended goes on, also on the
// other ranks, and may have ended since: the same call again takes its result up instead of waiting
// for a second one of theirs.
int RunOrResume(const std::string& call, std::function<int(engine::Engine&)> function) {
  struct Interrupted {
    std::weak_ptr<engine::Engine> engine;
    std::shared_future<int> result;
  };
  static auto* interrupted = new std::map<std::string, Interrupted>;  // guarded by the GIL
  const auto engine = engine::Global();
  const auto before = interrupted->extract(call);
  const std::shared_future<int> result =
      !before.empty() && before.mapped().engine.lock() == engine
          ? before.mapped().result
          : StartOnThread([engine, function = std::move(function)] { return function(*engine); });
  try {
    return WaitInterruptible(result);
  } catch (const py::error_already_set&) {
    (*interrupted)[call] = {engine, result};
    throw;
  }
}

py::object Failure() {
  const auto engine = engine::GlobalOrNull();
  if (!engine) return py::none();
  const Status status = engine->failure();
  if (status.ok()) return py::none();
  return py::make_tuple(KindName(status.kind()), status.message());
}

// Names of the registered specs; guarded by the GIL.
struct Names {
  std::map<int64_t, std::string> ordered;  // by their first registration
  std::unordered_map<std::string, int64_t> number_of;
  std::unordered_map<std::string, int> graphs_of;  // by domain: specs "<domain>#<number>"
  int64_t next = 0;
};
Names& RegisteredNames() {
  static auto* names = new Names;
  return *names;
}

// The domain of a spec that is registered as "<domain>#<number>" for a graph, else the name.
std::string DomainOf(const std::string& name) {
  const size_t mark = name.rfind('#');
  if (mark == std::string::npos || mark + 1 == name.size()) return name;
  const size_t digits = mark + (name[mark + 1] == 's' ? 2 : 1);  // See Note [Names of specs]
  const bool number = name.find_first_not_of("0123456789", digits) == std::string::npos;
  return number ? name.substr(0, mark) : name;
}

// Each domain once: without the specs of graphs whose domain has a spec under its own name.
std::vector<std::string> Registered() {
  const Names& names = RegisteredNames();
  std::vector<std::string> domains;
  for (const auto& [number, name] : names.ordered) {
    const std::string domain = DomainOf(name);
    if (domain == name || names.number_of.count(domain) == 0) domains.push_back(name);
  }
  return domains;
}

void Remove(const std::string& name) {
  Names& names = RegisteredNames();
  const auto at = names.number_of.find(name);
  if (at == names.number_of.end()) return;
  names.ordered.erase(at->second);
  names.number_of.erase(at);
  engine::ForgetSpec(name);
}

// "<domain>#<number>", and "<domain>" with the last of them. No op has it any more.
void ForgetSpec(const std::string& key, const std::string& alias) {
  Names& names = RegisteredNames();
  Remove(key);
  if (!alias.empty()) engine::ForgetSpec(alias);
  const std::string domain = DomainOf(key);
  if (domain == key || --names.graphs_of[domain] > 0) return;
  names.graphs_of.erase(domain);
  Remove(domain);
}

void RegisterSpec(const std::string& name, int process_set, const py::list& entries,
                  std::vector<int> group_ends, std::vector<int> order, std::vector<int> order_ends,
                  bool planned, const std::string& alias) {
  auto spec = MakeSpec(name, process_set, entries, std::move(group_ends));
  if (!order.empty())
    spec->proposal = std::make_shared<const engine::Arrangement>(
        engine::Arrangement{std::move(order), std::move(order_ends)});
  spec->planned = planned;
  if (!alias.empty()) engine::RegisterSpec(alias, spec);
  engine::RegisterSpec(std::move(spec));
  Names& names = RegisteredNames();
  if (!names.number_of.emplace(name, names.next).second) return;
  names.ordered[names.next++] = name;
  if (const std::string domain = DomainOf(name); domain != name) ++names.graphs_of[domain];
}

void BindTopology(py::module_& m) {
  m.def("rank", [] { return engine::Global()->topology().rank; });
  m.def("size", [] { return engine::Global()->topology().size; });
  m.def("local_rank", [] { return engine::Global()->topology().local_rank; });
  m.def("local_size", [] { return engine::Global()->topology().local_size; });
  m.def("cross_rank", [] { return engine::Global()->topology().cross_rank; });
  m.def("cross_size", [] { return engine::Global()->topology().cross_size; });
  m.def("is_homogeneous", [] { return engine::Global()->topology().homogeneous; });
}

}  // namespace

std::shared_ptr<engine::DomainSpec> MakeSpec(const std::string& name, int process_set,
                                             const py::list& entries, std::vector<int> group_ends) {
  auto spec = std::make_shared<engine::DomainSpec>();
  spec->name = name;
  spec->process_set = process_set;
  for (const py::handle entry : entries) spec->entries.push_back(MakeEntry(entry.cast<py::dict>()));
  spec->group_ends = std::move(group_ends);
  return spec;
}

void BindEngine(py::module_& m) {
  m.def("is_initialized", [] { return engine::GlobalOrNull() != nullptr; });
  m.def("shutdown", &Shutdown, py::arg("reason"));
  m.def("drop", &Drop);
  m.def("failure", &Failure);
  m.def(
      "abort",
      [](const std::string& kind, const std::string& message) {
        const Status cause(KindFromName(kind), message);
        const auto engine = engine::Global();
        py::gil_scoped_release release;
        engine->Abort(cause);
      },
      py::arg("kind"), py::arg("message"));

  BindTopology(m);
  m.def("describe", [] { return engine::Global()->world().Describe(); });
  m.def("metrics", [] { return MetricsDict(engine::Global()->metrics()); });
  m.def(
      "plan", [](const std::string& domain) { return engine::Global()->DescribePlan(domain); },
      py::arg("domain"));
  m.def("plans", [] { return PlansList(engine::Global()->PlanReports()); });

  m.def("register_spec", &RegisterSpec, py::arg("name"), py::arg("process_set"), py::arg("entries"),
        py::arg("group_ends"), py::arg("order") = std::vector<int>{},
        py::arg("order_ends") = std::vector<int>{}, py::arg("planned") = false,
        py::arg("alias") = "");
  m.def("registered", &Registered);
  m.def("forget_spec", &ForgetSpec, py::arg("key"), py::arg("alias") = "");

  m.def(
      "add_process_set",
      [](std::vector<int> ranks) {
        std::string call = "add_process_set";
        for (const int rank : ranks) call += ' ' + std::to_string(rank);
        return RunOrResume(call,
                           [ranks](engine::Engine& engine) { return engine.AddProcessSet(ranks); });
      },
      py::arg("ranks"));
  m.def(
      "remove_process_set",
      [](int id) {
        RunOrResume("remove_process_set " + std::to_string(id), [id](engine::Engine& engine) {
          engine.RemoveProcessSet(id);
          return 0;
        });
      },
      py::arg("id"));
  m.def(
      "process_set_ranks", [](int id) { return engine::Global()->ProcessSetRanks(id); },
      py::arg("id"));
  m.def("join",
        [] { return RunOrResume("join", [](engine::Engine& engine) { return engine.Join(); }); });
}

}  // namespace gradred::bindings
