// Every call of MPI goes through one checker: Mpi<Abi>::Call, or Try where the code is looked at.
#pragma once

#include <algorithm>
#include <string>

#include "base/status.h"
#include "comm/mpi/mpi_abi.h"
#include "comm/mpi/mpi_process.h"

namespace gradred::comm::mpi {

// One opened library, shared by all that call it.
template <class Abi>
class Mpi {
 public:
  explicit Mpi(const Library& library) : api(library), process_(Process::Get()) {}

  // The code that MPI returned. Throws kNotInitialized when MPI may not be called any more.
  template <class... Parameters, class... Arguments>
  int Try(int (*function)(Parameters...), Arguments... arguments) {
    process_.ThrowIfOver();
    if (!process_.one_at_a_time()) return function(arguments...);
    std::lock_guard<std::mutex> lock(process_.mutex());
    return function(arguments...);
  }

  // Throws kTransportError: "<what>: <MPI's own text>".
  void Check(int code, const std::string& what) {
    if (code != Abi::kSuccess) throw Error(Kind::kTransportError, what + ": " + ErrorText(code));
  }

  template <class... Parameters, class... Arguments>
  void Call(const char* what, int (*function)(Parameters...), Arguments... arguments) {
    const int code = Try(function, arguments...);
    if (code != Abi::kSuccess) Check(code, what);
  }

  bool IsTruncation(int code) {
    int error_class = Abi::kSuccess;
    return Try(api.Error_class, code, &error_class) == Abi::kSuccess &&
           error_class == Abi::kErrTruncate;
  }

  std::string ErrorText(int code) {
    char text[std::max({OpenMpiAbi::kMaxErrorString, MpichAbi::kMaxErrorString,
                        StandardAbi::kMaxErrorString}) +
              1] = "";
    int length = 0;
    if (Try(api.Error_string, code, text, &length) != Abi::kSuccess)
      return "MPI error " + std::to_string(code);
    return text;
  }

  const Api<Abi> api;

 private:
  Process& process_;
};

}  // namespace gradred::comm::mpi
