#include "comm/routed.h"

#include <string>

namespace gradred::comm {

RoutedTransport::RoutedTransport(int rank, std::vector<int> near_of,
                                 std::unique_ptr<Transport> near, std::unique_ptr<Transport> far)
    : rank_(rank),
      near_of_(std::move(near_of)),
      rank_of_near_(static_cast<size_t>(near->size())),
      near_(std::move(near)),
      far_(std::move(far)) {
  for (int r = 0; r < size(); ++r) {
    const int number = near_of_[static_cast<size_t>(r)];
    if (number >= 0) rank_of_near_[static_cast<size_t>(number)] = r;
  }
}

RoutedTransport::Route RoutedTransport::RouteTo(int peer) {
  const int number = peer >= 0 && peer < size() ? near_of_[static_cast<size_t>(peer)] : -1;
  if (number >= 0) return {near_.get(), number};
  if (peer < 0 || peer >= size() || far_ == nullptr) {
    throw Error(Kind::kInvalidArgument, "rank " + std::to_string(rank_) + " of " +
                                            std::to_string(size()) + ": a message with rank " +
                                            std::to_string(peer) + ", which nothing reaches");
  }
  return {far_.get(), peer};
}

WorkPtr RoutedTransport::Send(int peer, Tag tag, const void* data, int64_t nbytes) {
  const auto [transport, number] = RouteTo(peer);
  if (transport == far_.get()) far_sent_.fetch_add(nbytes, std::memory_order_relaxed);
  return transport->Send(number, tag, data, nbytes);
}

WorkPtr RoutedTransport::Recv(int peer, Tag tag, void* data, int64_t nbytes) {
  const auto [transport, number] = RouteTo(peer);
  return transport->Recv(number, tag, data, nbytes);
}

void RoutedTransport::Post(int peer, const std::string& bytes) {
  const auto [transport, number] = RouteTo(peer);
  transport->Post(number, bytes);
}

bool RoutedTransport::TakePosted(Message* message) {
  if (near_->TakePosted(message)) {
    message->source = rank_of_near_[static_cast<size_t>(message->source)];
    return true;
  }
  return far_ != nullptr && far_->TakePosted(message);
}

void RoutedTransport::Progress() {
  near_->Progress();
  if (far_ == nullptr) return;
  far_->Progress();
  NoteFar();
}

void RoutedTransport::NoteFar() {
  if (far_ != nullptr) far_moved_.store(far_->moved_nbytes(), std::memory_order_relaxed);
}

void RoutedTransport::Abort(const Status& cause) {
  if (far_ != nullptr) far_->Abort(cause);
  near_->Abort(cause);  // rings the bell
}

}  // namespace gradred::comm
