// What is one a process, however many fabrics it opens: whether MPI may still be called, one lock,
// and one MPI_Finalize.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

namespace gradred::comm::mpi {

// Note [When MPI may be called]
// Never again after an engine error: the state of MPI is unknown then, and MPI_Finalize would wait
// for lost peers. Never in a forked child: it shares sockets and shared memory with its parent.
// Both are one flag, which nothing clears. It is read before every call; a call that another thread
// has begun may still return. (A lock that Abort waits for would be stricter, and could hang on the
// very fault that Abort reports.)
class Process {
 public:
  // Of this process; never destroyed.
  static Process& Get();

  bool over() const { return over_.load(std::memory_order_acquire); }
  void End() { over_.store(true, std::memory_order_release); }
  void ThrowIfOver() const;  // kNotInitialized

  // Held around every call when the library's thread level is below MULTIPLE, else not needed.
  bool one_at_a_time() const { return one_at_a_time_.load(std::memory_order_relaxed); }
  void SetOneAtATime() { one_at_a_time_.store(true, std::memory_order_relaxed); }
  std::mutex& mutex() { return mutex_; }

  // See Note [MPI_Finalize]. `finalize` runs at most once.
  void FinalizeAtExit(std::function<void()> finalize);
  bool initialized_here() const { return finalize_ != nullptr; }
  // True: no rank waits for this one, and every fabric that was opened has been closed.
  void SetClean(bool clean) { clean_ = clean; }

  // Memory that MPI may still write to or read from, kept for good.
  void Bury(std::vector<char> memory);

 private:
  Process();
  void AtExit();

  std::atomic<bool> over_{false};
  std::atomic<bool> one_at_a_time_{false};
  std::atomic<bool> clean_{false};
  std::mutex mutex_;
  std::mutex graveyard_mutex_;
  std::vector<std::vector<char>> graveyard_;
  std::function<void()> finalize_;
};

}  // namespace gradred::comm::mpi
