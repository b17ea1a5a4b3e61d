#include "sparse/hypre.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/dynlib.h"
#include "base/graveyard.h"
#include "base/status.h"
#include "sparse/krylov.h"

namespace gradred::sparse {
namespace {

using Handle = void*;

// What is used of HYPRE, X(name after HYPRE_, parameter types). HYPRE_BigInt is passed by value as
// int64_t: the library reads as much of the register as it needs.
#define GRADRED_HYPRE_FUNCTIONS(X)                                                   \
  X(ClearAllErrors, ())                                                              \
  X(IJMatrixCreate, (Handle, int64_t, int64_t, int64_t, int64_t, Handle*))           \
  X(IJMatrixDestroy, (Handle))                                                       \
  X(IJMatrixSetObjectType, (Handle, int))                                            \
  X(IJMatrixInitialize, (Handle))                                                    \
  X(IJMatrixSetValues, (Handle, int, int*, const void*, const void*, const double*)) \
  X(IJMatrixAssemble, (Handle))                                                      \
  X(IJMatrixGetObject, (Handle, Handle*))                                            \
  X(IJVectorCreate, (Handle, int64_t, int64_t, Handle*))                             \
  X(IJVectorDestroy, (Handle))                                                       \
  X(IJVectorSetObjectType, (Handle, int))                                            \
  X(IJVectorInitialize, (Handle))                                                    \
  X(IJVectorSetValues, (Handle, int, const void*, const double*))                    \
  X(IJVectorGetValues, (Handle, int, const void*, double*))                          \
  X(IJVectorGetLocalRange, (Handle, void*, void*))                                   \
  X(IJVectorAssemble, (Handle))                                                      \
  X(IJVectorGetObject, (Handle, Handle*))                                            \
  X(ParVectorSetConstantValues, (Handle, double))                                    \
  X(BoomerAMGCreate, (Handle*))                                                      \
  X(BoomerAMGDestroy, (Handle))                                                      \
  X(BoomerAMGSetup, (Handle, Handle, Handle, Handle))                                \
  X(BoomerAMGSolve, (Handle, Handle, Handle, Handle))                                \
  X(BoomerAMGSolveT, (Handle, Handle, Handle, Handle))                               \
  X(BoomerAMGSetMaxIter, (Handle, int))                                              \
  X(BoomerAMGSetTol, (Handle, double))                                               \
  X(BoomerAMGSetCoarsenType, (Handle, int))                                          \
  X(BoomerAMGSetInterpType, (Handle, int))                                           \
  X(BoomerAMGSetRelaxType, (Handle, int))                                            \
  X(BoomerAMGSetRelaxWt, (Handle, double))                                           \
  X(BoomerAMGSetPrintLevel, (Handle, int))

struct Api {
#define GRADRED_MEMBER(name, parameters) int(*name) parameters = nullptr;
  GRADRED_HYPRE_FUNCTIONS(GRADRED_MEMBER)
#undef GRADRED_MEMBER
  std::string name;
};

std::string LoadApi(const DynLib& library, Api* api) {
  // HYPRE without an MPI, or with another one than the job's, would compute on each rank alone.
  const auto mpi_initialized = reinterpret_cast<int (*)(int*)>(library.Find("MPI_Initialized"));
  int initialized = 0;
  if (mpi_initialized == nullptr || mpi_initialized(&initialized) != 0 || !initialized)
    return library.name() + " uses another MPI library than this job, or none";
  // A 64-bit HYPRE_Int would be read as two.
  const auto version =
      reinterpret_cast<int (*)(void*, void*, void*, void*)>(library.Find("HYPRE_VersionNumber"));
  int64_t major = -1;
  if (version != nullptr) version(&major, nullptr, nullptr, nullptr);
  if (version == nullptr || major == static_cast<int32_t>(major))
    return library.name() +
           ": expected release 2.19 or later with 32-bit integers for local "
           "indices (HYPRE_Int), got another";
  const char* missing = nullptr;
#define GRADRED_LOAD(function, parameters)                                                     \
  api->function = reinterpret_cast<decltype(api->function)>(library.Find("HYPRE_" #function)); \
  if (api->function == nullptr) missing = #function;
  GRADRED_HYPRE_FUNCTIONS(GRADRED_LOAD)
#undef GRADRED_LOAD
  if (missing != nullptr) return library.name() + " lacks HYPRE_" + missing;
  // The name since 2.29, and the one before.
  for (const char* name : {"HYPRE_Initialize", "HYPRE_Init"}) {
    if (const auto initialize = reinterpret_cast<int (*)()>(library.Find(name))) {
      initialize();
      break;
    }
  }
  api->name = library.name();
  return "";
}

struct Library {
  std::mutex mutex;
  bool tried = false;
  std::string why_not;
  Api api;
};

Library& TheLibrary() {
  static auto* library = new Library;  // solvers may outlive static objects
  return *library;
}

std::vector<std::string> Names() {
  std::vector<std::string> names = {"libHYPRE.so"};
  for (int minor = 40; minor >= 19; --minor)
    names.push_back("libHYPRE-2." + std::to_string(minor) + ".0.so");
  return names;
}

// Destroyed on all ranks of its communicator together.
class BoomerAmg {
 public:
  BoomerAmg(const std::string& mpi_communicator, const Pattern& pattern, const double* values,
            bool symmetric)
      : api_(TheLibrary().api), rows_(static_cast<int>(pattern.rows())) {
    // An MPI_Comm is a pointer or an int, which travel in one register alike.
    std::memcpy(&comm_, mpi_communicator.data(), std::min(mpi_communicator.size(), sizeof comm_));
    first_ = pattern.first_row();
    b_ = MakeVector(&b_object_);
    x_ = MakeVector(&x_object_);
    int64_t low = -1, high = -1;
    Check("IJVectorGetLocalRange", api_.IJVectorGetLocalRange(b_, &low, &high));
    wide_ = low == first_;  // a HYPRE_BigInt of 32 bits has left half of it
    if (wide_)
      SetUp<int64_t>(pattern, values);
    else
      SetUp<int32_t>(pattern, values);
    Check("BoomerAMGCreate", api_.BoomerAMGCreate(&amg_));
    constexpr int kHmis = 10, kExtendedI = 6, kL1SymmetricGaussSeidel = 8, kJacobi = 7;
    api_.BoomerAMGSetPrintLevel(amg_, 0);
    api_.BoomerAMGSetMaxIter(amg_, 1);
    api_.BoomerAMGSetTol(amg_, 0);
    api_.BoomerAMGSetCoarsenType(amg_, kHmis);
    api_.BoomerAMGSetInterpType(amg_, kExtendedI);
    // The transposed cycle knows Jacobi alone.
    api_.BoomerAMGSetRelaxType(amg_, symmetric ? kL1SymmetricGaussSeidel : kJacobi);
    if (!symmetric) api_.BoomerAMGSetRelaxWt(amg_, 0.7);
    Check("BoomerAMGSetup", api_.BoomerAMGSetup(amg_, a_object_, b_object_, x_object_));
    ++count;
  }

  ~BoomerAmg() {
    --count;
    if (amg_ != nullptr) api_.BoomerAMGDestroy(amg_);
    if (a_ != nullptr) api_.IJMatrixDestroy(a_);
    if (b_ != nullptr) api_.IJVectorDestroy(b_);
    if (x_ != nullptr) api_.IJVectorDestroy(x_);
  }

  static std::atomic<int64_t> count;

  void Apply(const double* r, double* z, bool transposed) {
    Check("IJVectorSetValues", api_.IJVectorSetValues(b_, rows_, indices(), r));
    Check("ParVectorSetConstantValues", api_.ParVectorSetConstantValues(x_object_, 0));
    const auto cycle = transposed ? api_.BoomerAMGSolveT : api_.BoomerAMGSolve;
    cycle(amg_, a_object_, b_object_, x_object_);
    api_.ClearAllErrors();  // that one cycle has not converged
    Check("IJVectorGetValues", api_.IJVectorGetValues(x_, rows_, indices(), z));
  }

 private:
  static constexpr int kParCsr = 5555;

  void Check(const char* function, int code) const {
    if (code == 0) return;
    api_.ClearAllErrors();
    throw Error(Kind::kInternal,
                api_.name + ": HYPRE_" + function + " failed with code " + std::to_string(code));
  }

  const void* indices() const {
    return wide_ ? static_cast<const void*>(wide_rows_.data()) : narrow_rows_.data();
  }

  Handle MakeVector(Handle* object) {
    Handle vector = nullptr;
    Check("IJVectorCreate", api_.IJVectorCreate(comm_, first_, first_ + rows_ - 1, &vector));
    Check("IJVectorSetObjectType", api_.IJVectorSetObjectType(vector, kParCsr));
    Check("IJVectorInitialize", api_.IJVectorInitialize(vector));
    Check("IJVectorAssemble", api_.IJVectorAssemble(vector));
    Check("IJVectorGetObject", api_.IJVectorGetObject(vector, object));
    return vector;
  }

  template <class Big>
  void SetUp(const Pattern& pattern, const double* values) {
    if (pattern.row_stripes().total() > std::numeric_limits<Big>::max())
      throw Error(Kind::kUnsupported, api_.name +
                                          ": expected fewer than 2^31 rows for its 32-bit "
                                          "indices (HYPRE_BigInt), got " +
                                          std::to_string(pattern.row_stripes().total()));
    const int64_t last = first_ + rows_ - 1;
    Check("IJMatrixCreate", api_.IJMatrixCreate(comm_, first_, last, first_, last, &a_));
    Check("IJMatrixSetObjectType", api_.IJMatrixSetObjectType(a_, kParCsr));
    Check("IJMatrixInitialize", api_.IJMatrixInitialize(a_));
    auto& rows = [this]() -> auto& {
      if constexpr (std::is_same_v<Big, int64_t>)
        return wide_rows_;
      else
        return narrow_rows_;
    }();
    std::vector<int> counts;
    std::vector<Big> columns;
    for (int64_t i = 0; i < rows_; ++i) {
      rows.push_back(static_cast<Big>(first_ + i));
      counts.push_back(static_cast<int>(pattern.starts()[i + 1] - pattern.starts()[i]));
    }
    for (const int32_t c : pattern.local_columns())
      columns.push_back(static_cast<Big>(pattern.GlobalColumn(c)));
    Check("IJMatrixSetValues",
          api_.IJMatrixSetValues(a_, rows_, counts.data(), rows.data(), columns.data(), values));
    Check("IJMatrixAssemble", api_.IJMatrixAssemble(a_));
    Check("IJMatrixGetObject", api_.IJMatrixGetObject(a_, &a_object_));
  }

  const Api& api_;
  const int rows_;
  Handle comm_ = nullptr;
  int64_t first_ = 0;
  bool wide_ = false;  // HYPRE_BigInt has 64 bits
  std::vector<int64_t> wide_rows_;
  std::vector<int32_t> narrow_rows_;
  Handle a_ = nullptr, b_ = nullptr, x_ = nullptr, amg_ = nullptr;
  Handle a_object_ = nullptr, b_object_ = nullptr, x_object_ = nullptr;
};

std::atomic<int64_t> BoomerAmg::count{0};

// Those of a channel, numbered alike on all its ranks. See Note [Freeing what HYPRE holds].
class Hierarchies {
 public:
  static std::shared_ptr<Hierarchies> Of(diff::Channel& channel) {
    std::shared_ptr<void>& kept = channel.kept();
    if (kept == nullptr) kept = std::make_shared<Hierarchies>();
    return std::static_pointer_cast<Hierarchies>(kept);
  }
  ~Hierarchies() {
    for (auto& [number, hierarchy] : hierarchies_) Bury(hierarchy);
  }

  // Collective.
  void FreeGivenUp(diff::Channel& channel) {
    std::vector<double> here;  // in the order of numbers
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [number, hierarchy] : hierarchies_)
        here.push_back(static_cast<double>(given_up_.count(number)));
    }
    auto next = hierarchies_.begin();
    for (const double ranks : SumOverRanks(channel, here)) {
      const auto at = next++;
      if (ranks != channel.size()) continue;
      Forget(at->first);
      hierarchies_.erase(at);
    }
  }

  std::pair<int64_t, BoomerAmg*> Add(std::unique_ptr<BoomerAmg> hierarchy) {
    BoomerAmg* added = hierarchy.get();
    hierarchies_.emplace(next_, std::move(hierarchy));
    return {next_++, added};
  }

  // Any thread.
  void GiveUp(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_.insert(number);
  }

 private:
  void Forget(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_.erase(number);
  }

  std::map<int64_t, std::unique_ptr<BoomerAmg>> hierarchies_;  // of the channel's worker alone
  int64_t next_ = 0;
  std::mutex mutex_;
  std::set<int64_t> given_up_;
};

// One of them, for as long as its owner wants it.
class Hierarchy final : public Preconditioner {
 public:
  Hierarchy(std::shared_ptr<Hierarchies> kept, std::unique_ptr<BoomerAmg> hierarchy)
      : kept_(std::move(kept)) {
    std::tie(number_, hierarchy_) = kept_->Add(std::move(hierarchy));
  }
  ~Hierarchy() override { kept_->GiveUp(number_); }
  void Apply(const double* r, double* z, bool transposed) override {
    hierarchy_->Apply(r, z, transposed);
  }

 private:
  const std::shared_ptr<Hierarchies> kept_;
  int64_t number_ = 0;
  BoomerAmg* hierarchy_ = nullptr;
};

}  // namespace

std::string FindHypre(const std::string& path) {
  Library& library = TheLibrary();
  std::lock_guard<std::mutex> lock(library.mutex);
  if (std::exchange(library.tried, true)) return library.why_not;
  library.why_not =
      "HYPRE was not found: install it (Debian: libhypre-dev), or set "
      "GRADRED_HYPRE_LIBRARY to the path of its library";
  for (const std::string& name : path.empty() ? Names() : std::vector<std::string>{path}) {
    std::string why;
    if (const DynLib opened = DynLib::TryOpen({name}, &why)) {
      library.why_not = LoadApi(opened, &library.api);
      break;
    }
    if (why.find(name + ": cannot open shared object file") != 0)  // it is there
      library.why_not = "HYPRE cannot be opened: " + why;
  }
  return library.why_not;
}

int64_t CountHierarchies() { return BoomerAmg::count; }

std::unique_ptr<Preconditioner> MakeBoomerAmg(diff::Channel& channel, const Pattern& pattern,
                                              const double* values, bool symmetric) {
  const std::shared_ptr<Hierarchies> kept = Hierarchies::Of(channel);
  kept->FreeGivenUp(channel);
  return std::make_unique<Hierarchy>(
      kept, std::make_unique<BoomerAmg>(channel.MpiCommunicator(), pattern, values, symmetric));
}

}  // namespace gradred::sparse
