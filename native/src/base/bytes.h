// Little binary messages: fixed-width integers in host order (one job, one architecture) and
// length-prefixed strings.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/status.h"

namespace gradred {

class Writer {
 public:
  template <class T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutString(const std::string& text) {
    Put<uint64_t>(text.size());
    bytes_ += text;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Throws kTransportError when the message is shorter than what is read.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}
  template <class T>
  T Get() {
    Need(sizeof(T));
    T value;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string GetString() {
    const uint64_t n = Get<uint64_t>();
    Need(n);
    std::string text(at_, n);
    at_ += n;
    return text;
  }
  bool AtEnd() const { return at_ == end_; }

 private:
  void Need(uint64_t n) const {
    if (static_cast<uint64_t>(end_ - at_) < n)
      throw Error(Kind::kTransportError, "a message between ranks is cut short: expected " +
                                             std::to_string(n) + " more bytes, got " +
                                             std::to_string(end_ - at_));
  }
  const char* at_;
  const char* end_;
};

}  // namespace gradred
