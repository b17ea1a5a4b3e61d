// Batches of the neutral API: arrays in; arrays out, fresh ones or the caller's.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "arrays.h"
#include "base/clock.h"
#include "bindings.h"

namespace gradred::bindings {
namespace {

using engine::DomainSpecPtr;
using engine::EntrySpec;
using engine::Op;

// What the engine's threads write of a batch in flight. No Python object in it: the last owner may
// be any thread.
struct Flight {
  explicit Flight(size_t entries) : left(entries), results(entries), outputs(entries) {}
  std::mutex mutex;
  std::condition_variable finished;
  size_t left;
  std::vector<engine::Result> results;
  std::vector<std::shared_ptr<Buffer>> outputs;

  bool Done() {
    std::lock_guard<std::mutex> lock(mutex);
    return left == 0;
  }
};
using FlightPtr = std::shared_ptr<Flight>;

// Inputs and outputs whose handle went away before the engine was done with them; freed, under the
// GIL, when a later batch starts.
struct Orphan {
  FlightPtr flight;
  std::vector<py::object> inputs;
};
std::vector<Orphan>& Orphans() {
  static auto* orphans =
      new std::vector<Orphan>;  // never destroyed: the interpreter may be gone by then
  return *orphans;
}
void FreeOrphans() {
  std::vector<Orphan> before = std::move(Orphans());
  Orphans().clear();
  for (Orphan& orphan : before) {
    if (!orphan.flight->Done()) Orphans().push_back(std::move(orphan));
  }
  // Freeing the others may run Python code, which may start batches: only now, when the list is
  // whole again.
}

int64_t CountOf(const engine::Shape& shape) {
  int64_t count = 1;
  for (const int64_t n : shape) count *= n;
  return count;
}

bool OutputKnown(Op op) { return op == Op::kAllReduce || op == Op::kBroadcast; }

// The array of an input or output; throws kInvalidArgument when it does not fit its entry.
py::array ArrayOf(const EntrySpec& entry, const py::object& object, const char* what) {
  const auto refuse = [&](const std::string& why) {
    throw Error(Kind::kInvalidArgument, std::string(engine::OpName(entry.op)) + " of '" +
                                            entry.label + "': " + what + ": " + why);
  };
  if (!py::isinstance<py::array>(object)) refuse("expected a NumPy array");
  const auto array = py::reinterpret_borrow<py::array>(object);
  if ((array.flags() & py::array::c_style) == 0) refuse("expected a C-contiguous array");
  const int64_t expected = CountOf(entry.shape) * DTypeSize(entry.dtype);
  if (array.nbytes() != expected) {
    refuse("expected " + std::to_string(expected) + " bytes, got " +
           std::to_string(array.nbytes()));
  }
  return array;
}

const void* InputData(const EntrySpec& entry, const py::object& input) {
  return ArrayOf(entry, input, "input").data();
}

void* OutputData(const EntrySpec& entry, const py::object& output) {
  if (!OutputKnown(entry.op))
    throw Error(Kind::kInvalidArgument, std::string(engine::OpName(entry.op)) + " of '" +
                                            entry.label + "' makes its own output");
  return ArrayOf(entry, output, "output").mutable_data();  // throws when it is not writable
}

class Handle {
 public:
  Handle(DomainSpecPtr spec, std::vector<py::object> inputs,
         std::vector<std::optional<std::vector<int64_t>>> splits, std::vector<py::object> outputs)
      : spec_(std::move(spec)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        flight_(std::make_shared<Flight>(spec_->entries.size())) {
    if (inputs_.size() != spec_->entries.size()) {
      throw Error(Kind::kInvalidArgument, "'" + spec_->name + "': expected " +
                                              std::to_string(spec_->entries.size()) +
                                              " inputs, got " + std::to_string(inputs_.size()));
    }
    outputs_.resize(inputs_.size(), py::none());
    submissions_.resize(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      Prepare(i, &submissions_[i]);
      if (i < splits.size()) submissions_[i].splits = std::move(splits[i]);
    }
  }

  // Gives the batch to the engine; does not wait. Once. `then` is of the last tensor.
  void Launch(engine::Then then) {
    const auto engine = engine::Global();
    engine_ = engine;
    py::gil_scoped_release release;
    batch_ = engine->Open(spec_);
    launched_ = true;
    size_t given = 0;
    try {
      for (; given < submissions_.size(); ++given) {
        const bool last = given + 1 == submissions_.size();
        engine->Submit(batch_, static_cast<int>(given), std::move(submissions_[given]),
                       last ? then : engine::Then::kStep);
      }
    } catch (const Error& error) {  // an argument: the peers must not wait for the rest
      {
        std::lock_guard<std::mutex> lock(flight_->mutex);
        flight_->left -= submissions_.size() - given;  // which nobody will finish
      }
      engine->Abandon(batch_, error.what());
      throw;
    }
    submissions_.clear();
  }

  ~Handle() {
    if (!launched_ || flight_->Done()) return;
    inputs_.insert(inputs_.end(), outputs_.begin(), outputs_.end());
    Orphans().push_back({flight_, std::move(inputs_)});
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool Done() const { return flight_->Done(); }

  // Holding the GIL. Throws the first entry's error, kTimeout after `timeout_s`, and what a signal
  // handler raises.
  py::list Wait(std::optional<double> timeout_s) {
    Finish(timeout_s);
    return Results();
  }

  // Once finished.
  py::list Results() const {
    py::list results;
    for (size_t i = 0; i < flight_->results.size(); ++i) {
      const engine::Result& result = flight_->results[i];
      results.append(py::make_tuple(Output(i), result.present, result.received_splits));
    }
    return results;
  }

  // The same without results.
  void Finish(std::optional<double> timeout_s) {
    if (timeout_s && !(*timeout_s >= 0))
      throw Error(Kind::kInvalidArgument, "wait: timeout=" + std::to_string(*timeout_s) +
                                              ": expected None or seconds, at least 0");
    const bool limited = timeout_s && *timeout_s < 1e9;
    const Nanos deadline = limited ? Now() + static_cast<Nanos>(*timeout_s * kSecond) : kForever;
    const std::chrono::nanoseconds longest = SignalSlice();
    const auto slice = [&] {
      return limited ? std::min(longest, std::chrono::nanoseconds(deadline - Now())) : longest;
    };
    bool done = Step(slice().count());
    while (!done) {
      // In a forked child nobody would end it.
      if (const auto engine = engine_.lock()) engine->RefuseChild();
      {
        py::gil_scoped_release release;
        std::unique_lock<std::mutex> lock(flight_->mutex);
        done = flight_->finished.wait_for(lock, slice(), [this] { return flight_->left == 0; });
      }
      if (done) break;
      CheckSignals();
      if (limited && Now() >= deadline) {
        throw Error(Kind::kTimeout, "'" + spec_->name + "' is not finished after " +
                                        std::to_string(*timeout_s) +
                                        " s; it goes on, wait again for its results");
      }
    }
    inputs_.clear();
    for (const engine::Result& result : flight_->results) ThrowIfError(result.status);
  }

  // Once finished: the caller's array, or a fresh one; None of a barrier.
  py::object Output(size_t i) const {
    if (!flight_->outputs[i]) return outputs_[i];
    const EntrySpec& entry = spec_->entries[i];
    return WrapBuffer(flight_->outputs[i], entry.dtype,
                      OutputKnown(entry.op) ? entry.shape : flight_->results[i].shape);
  }

  void Abandon(const std::string& reason) {
    const auto engine = engine_.lock();
    if (!engine || !batch_) return;
    py::gil_scoped_release release;
    engine->Abandon(batch_, reason);
  }

 private:
  // Moves the engine on in this thread, which has nothing else to do. True if it has finished.
  bool Step(Nanos longest) {
    py::gil_scoped_release release;
    if (const auto engine = engine_.lock())
      engine->StepUntil([this] { return flight_->Done(); }, longest);
    return flight_->Done();
  }

  void Prepare(size_t i, engine::Submission* submission) {
    const EntrySpec& entry = spec_->entries[i];
    submission->absent = inputs_[i].is_none() && entry.op != Op::kBarrier;
    if (!inputs_[i].is_none()) submission->input = InputData(entry, inputs_[i]);
    if (!outputs_[i].is_none()) {
      submission->output = OutputData(entry, outputs_[i]);
    } else if (OutputKnown(entry.op)) {
      const int64_t nbytes = CountOf(entry.shape) * DTypeSize(entry.dtype);
      flight_->outputs[i] = Buffer::Make(nbytes);
      if (!flight_->outputs[i]) {
        throw Error(Kind::kInvalidArgument, "'" + entry.label + "': no memory for a result of " +
                                                std::to_string(nbytes) + " bytes");
      }
      submission->output = flight_->outputs[i]->data();
    } else if (entry.op != Op::kBarrier) {
      submission->allocate = [flight = flight_, i,
                              itemsize = DTypeSize(entry.dtype)](const engine::Shape& shape) {
        flight->outputs[i] = Buffer::Make(CountOf(shape) * itemsize);
        return flight->outputs[i] ? flight->outputs[i]->data() : nullptr;
      };
    }
    submission->done = [flight = flight_, i](const engine::Result& result) {
      std::lock_guard<std::mutex> lock(flight->mutex);
      flight->results[i] = result;
      if (--flight->left == 0) flight->finished.notify_all();
    };
  }

  DomainSpecPtr spec_;
  std::vector<py::object> inputs_, outputs_;  // an output that is None: a fresh array
  FlightPtr flight_;
  std::vector<engine::Submission> submissions_;
  std::weak_ptr<engine::Engine> engine_;
  engine::OpenBatchPtr batch_;
  bool launched_ = false;  // the engine may use the inputs
};

using Splits = std::vector<std::optional<std::vector<int64_t>>>;

// What a call asks for, apart from its tensors. Kept by callers that make the same call again: the
// engine then has its plan, and the ranks have agreed on it.
struct Spec {
  DomainSpecPtr spec;
};

std::unique_ptr<Handle> Start(const Spec& spec, std::vector<py::object> inputs,
                              std::vector<py::object> outputs, Splits splits) {
  FreeOrphans();
  auto handle =
      std::make_unique<Handle>(spec.spec, std::move(inputs), std::move(splits), std::move(outputs));
  handle->Launch(engine::Then::kStep);
  return handle;
}

void LaunchAndFinish(Handle* handle) {
  handle->Launch(engine::Then::kWait);
  try {
    handle->Finish(std::nullopt);
  } catch (
      py::error_already_set& error) {  // a signal's handler raised: nobody will ask for the results
    handle->Abandon(py::str(error.type().attr("__name__")).cast<std::string>() + " while waiting");
    throw;
  }
}

py::list Run(const Spec& spec, std::vector<py::object> inputs, std::vector<py::object> outputs,
             Splits splits) {
  FreeOrphans();
  Handle handle(spec.spec, std::move(inputs), std::move(splits), std::move(outputs));
  LaunchAndFinish(&handle);
  return handle.Results();
}

// `out` can take the reduction of `array`, which is contiguous.
bool Fits(const py::array& array, const py::object& out) {
  if (out.is(array)) return array.writeable();
  if (!py::isinstance<py::array>(out)) return false;
  const auto other = py::reinterpret_borrow<py::array>(out);
  if ((other.flags() & py::array::c_style) == 0 || !other.writeable() ||
      !other.dtype().is(array.dtype()) || other.ndim() != array.ndim() ||
      !std::equal(array.shape(), array.shape() + array.ndim(), other.shape()))
    return false;
  const char* const a = static_cast<const char*>(array.data());
  const char* const b = static_cast<const char*>(other.data());
  return a == b || a + array.nbytes() <= b || b + array.nbytes() <= a;
}

// A call on one array that was found good before, in all but the memory; null: it is not.
std::unique_ptr<Handle> MakeOne(const Spec& spec, const py::array& array, const py::object& out) {
  const bool fresh = out.is_none();
  if ((array.flags() & py::array::c_style) == 0) return nullptr;
  if (fresh ? spec.spec->entries[0].dtype == DType::kBfloat16 : !Fits(array, out)) return nullptr;
  FreeOrphans();
  std::vector<py::object> outputs;
  if (!fresh) outputs.push_back(out);
  return std::make_unique<Handle>(spec.spec, std::vector<py::object>{array}, Splits{},
                                  std::move(outputs));
}

std::unique_ptr<Handle> StartOne(const Spec& spec, const py::array& array, const py::object& out) {
  auto handle = MakeOne(spec, array, out);
  if (handle) handle->Launch(engine::Then::kStep);
  return handle;
}

py::object RunOne(const Spec& spec, const py::array& array, const py::object& out) {
  const auto handle = MakeOne(spec, array, out);
  if (!handle) return py::none();
  LaunchAndFinish(handle.get());
  return handle->Output(0);
}

}  // namespace

void BindHandle(py::module_& m) {
  py::class_<Handle>(m, "Handle")
      .def("done", &Handle::Done)
      .def("wait", &Handle::Wait, py::arg("timeout") = py::none())
      .def("abandon", &Handle::Abandon, py::arg("reason"));
  py::class_<Spec>(m, "Spec")
      .def(py::init([](const std::string& name, int process_set, const py::list& entries,
                       std::vector<int> group_ends) {
             return Spec{MakeSpec(name, process_set, entries, std::move(group_ends))};
           }),
           py::arg("name"), py::arg("process_set"), py::arg("entries"), py::arg("group_ends"))
      .def("run", &RunOne, py::arg("array"), py::arg("out").none(true))
      .def("start", &StartOne, py::arg("array"), py::arg("out").none(true));
  const auto call = [&m](const char* name, auto function) {
    m.def(name, function, py::arg("spec"), py::arg("inputs"),
          py::arg("outputs") = std::vector<py::object>{}, py::arg("splits") = Splits{});
  };
  call("start", &Start);
  call("run", &Run);
}

}  // namespace gradred::bindings
