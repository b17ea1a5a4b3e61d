// Where memory goes that somebody may still write to after a failure: it stays for as long as the
// process lives, reachable, so that leak checkers know that it is meant.
#pragma once

#include <memory>

namespace gradred {

void BuryPointer(void* pointer);

template <class T, class Deleter>
void Bury(std::unique_ptr<T, Deleter>& owner) {
  if (owner != nullptr) BuryPointer(const_cast<void*>(static_cast<const void*>(owner.release())));
}

}  // namespace gradred
