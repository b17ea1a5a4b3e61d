#include "comm/loopback/hub.h"

#include <algorithm>
#include <iterator>

namespace gradred::comm {

LoopbackHub::LoopbackHub(int size) {
  for (int r = 0; r < size; ++r) boxes_.push_back(std::make_unique<Box>());
}

void LoopbackHub::Kill(int rank) {
  boxes_[rank]->dead = true;
  // What is on its way is lost too: tests must not depend on how far it came.
  for (auto& box : boxes_) {
    const std::lock_guard<std::mutex> lock(box->mutex);
    auto& letters = box->letters;
    letters.erase(std::remove_if(letters.begin(), letters.end(),
                                 [&](const Letter& letter) {
                                   return letter.source == rank || box == boxes_[rank];
                                 }),
                  letters.end());
  }
}

void LoopbackHub::Deliver(int to, Letter letter) {
  Box& box = *boxes_[to];
  {
    const std::lock_guard<std::mutex> lock(box.mutex);
    if (box.dead || boxes_[letter.source]->dead) return;
    box.letters.push_back(std::move(letter));
    box.full.store(true, std::memory_order_release);
  }
  Doorbell(&box.bell, false).Ring();
}

void LoopbackHub::Collect(int rank, std::deque<Letter>* letters) {
  Box& box = *boxes_[rank];
  if (!box.full.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(box.mutex);
  std::move(box.letters.begin(), box.letters.end(), std::back_inserter(*letters));
  box.letters.clear();
  box.full.store(false, std::memory_order_relaxed);
}

}  // namespace gradred::comm
