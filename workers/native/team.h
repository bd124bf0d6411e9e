// Threads that compute a step together.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace {

constexpr int SPINS = 2000;  // before a thread that waits lets others run

// Threads that share the work of each phase of a step, and wait for each other at its end.
class Team {
 public:
  explicit Team(int64_t phases) : taken_(size_t(phases)) {}

  // Runs work(thread) on so many threads, or on fewer where the system has no more.
  template <typename Work>
  void run(int64_t threads, Work work) {
    std::vector<std::thread> helpers;
    try {
      helpers.reserve(size_t(threads));
      for (int64_t thread = 1; thread < threads; ++thread)
        helpers.emplace_back([this, work, thread] {
          wait_while([this] { return threads_.load(std::memory_order_acquire) == 0; });
          work(thread);
        });
    } catch (const std::exception&) {
      // Those that there are do all.
    }
    threads_.store(int64_t(helpers.size()) + 1, std::memory_order_release);
    work(0);
    for (std::thread& helper : helpers) helper.join();
  }

  // Does the n parts of a phase, each on one of the threads, which all call this.
  template <typename Work>
  void share(int64_t phase, int64_t n, Work work) {
    std::atomic<int64_t>& taken = taken_[size_t(phase)];
    for (int64_t i = taken++; i < n; i = taken++) work(i);
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_.load(std::memory_order_relaxed)) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      wait_while([&] { return round_.load(std::memory_order_acquire) == round; });
    }
  }

 private:
  template <typename Waits>
  static void wait_while(Waits waits) {
    for (int spins = 0; waits(); ++spins)
      if (spins > SPINS) std::this_thread::yield();
  }

  std::vector<std::atomic<int64_t>> taken_;
  std::atomic<int64_t> threads_{0}, arrived_{0}, round_{0};
};

}  // namespace
