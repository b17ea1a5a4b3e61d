#include "base/graveyard.h"

#include <mutex>
#include <vector>

namespace gradred {

void BuryPointer(void* pointer) {
  static auto* mutex = new std::mutex;
  static auto* buried = new std::vector<void*>;
  std::lock_guard<std::mutex> lock(*mutex);
  buried->push_back(pointer);
}

}  // namespace gradred
