// A shared library opened at run time, with checked symbols.
#pragma once

#include <string>
#include <vector>

namespace gradred {

class DynLib {
 public:
  DynLib() = default;
  // Opens the first of `names` that loads, and never closes it. Throws kUnsupported with what was
  // tried.
  static DynLib Open(const std::vector<std::string>& names, bool global = false);
  // As Open, but an empty DynLib when none loads; `why` gets the reasons.
  static DynLib TryOpen(const std::vector<std::string>& names, std::string* why,
                        bool global = false);

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }
  void* handle() const { return handle_; }
  void* Find(const char* symbol) const;     // null when absent
  void* Require(const char* symbol) const;  // throws kUnsupported naming library and symbol

 private:
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace gradred
