// The thread pool: shares that threads work off and steal from, and waiting by spinning, then on a futex.
#include "runtime/thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fd {
namespace {

// Within a step the next job follows at once, or after some microseconds of Python between two layers, so a worker that
// spins this long is still awake. Between steps, or when the engine is idle, a worker parks and leaves its core to the
// API server.
constexpr auto kSpin = std::chrono::microseconds(100);

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Returns once word != seen: spins, then parks. `parked` counts the parked, so that wakers can skip the system call.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int>& parked) {
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return;
      _mm_pause();
    }
    if (std::chrono::steady_clock::now() > give_up) break;
  }
  while (word.load(std::memory_order_acquire) == seen) {
    // seq_cst on both sides: either the waker sees parked > 0, or this thread sees the new word in the futex.
    parked.fetch_add(1);
    if (word.load() == seen) futex_wait(&word, seen);
    parked.fetch_sub(1);
  }
}

// A half-open range of items, packed so that owner (front) and thieves (back) claim pieces by compare-and-swap.
struct alignas(128) Share {
  std::atomic<uint64_t> bounds{0};

  static uint64_t pack(int64_t lo, int64_t hi) { return static_cast<uint64_t>(hi) << 32 | static_cast<uint64_t>(lo); }

  bool claim(uint32_t grain, bool from_front, int64_t* begin, int64_t* end) {
    uint64_t old = bounds.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t lo = static_cast<uint32_t>(old), hi = static_cast<uint32_t>(old >> 32);
      if (lo >= hi) return false;
      const uint32_t count = std::min(grain, hi - lo);
      const uint64_t rest = from_front ? pack(lo + count, hi) : pack(lo, hi - count);
      if (bounds.compare_exchange_weak(old, rest, std::memory_order_acq_rel)) {
        *begin = from_front ? lo : hi - count;
        *end = *begin + count;
        return true;
      }
    }
  }
};

thread_local bool in_job = false;  // this thread is in a job of the pool

class Pool {
 public:
  // Throws system_error where the system gives no more threads.
  explicit Pool(int threads) : shares_(threads) {
    workers_.reserve(static_cast<size_t>(threads));
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker_loop(i); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  int size() const { return static_cast<int>(shares_.size()); }

  // Throws the first exception of any thread, once all threads have left the job.
  void run(int64_t n, int64_t grain, PiecesFn fn, void* context) {
    const int64_t threads = size();
    fn_ = fn;
    context_ = context;
    grain_ = static_cast<uint32_t>(grain);
    for (int64_t t = 0; t < threads; ++t)
      shares_[t].bounds.store(Share::pack(n * t / threads, n * (t + 1) / threads), std::memory_order_relaxed);
    gate_.store(kOpen, std::memory_order_release);
    job_.fetch_add(1);
    if (workers_parked_.load() > 0) futex_wake_all(&job_);
    work(0);
    // A worker that has not entered by now (it was parked, or lost its core) finds the gate closed, and this thread
    // does not wait for it. Workers inside must leave before the fields above may be written again.
    uint32_t inside = gate_.fetch_and(~kOpen) & ~kOpen;
    while (inside != 0) {
      wait_for_change(gate_, inside, caller_parked_);
      inside = gate_.load(std::memory_order_acquire);
    }
    if (failed_.load(std::memory_order_relaxed)) {
      failed_ = false;
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;

  class Shares final : public Pieces {
   public:
    Shares(Pool& pool, int self) : pool_(pool), self_(self) {}

    bool next(int64_t* begin, int64_t* end) override {
      for (; distance_ < pool_.size(); ++distance_) {
        Share& share = pool_.shares_[(self_ + distance_) % pool_.size()];
        if (share.claim(pool_.grain_, distance_ == 0, begin, end)) return true;
      }
      return false;
    }

   private:
    Pool& pool_;
    const int self_;
    int distance_ = 0;  // to the thread whose share pieces are claimed from
  };

  void stop() {
    stopping_ = true;
    job_.fetch_add(1);
    futex_wake_all(&job_);
    for (auto& worker : workers_) worker.join();
  }

  // Catches every exception of the job, so that the gate is always left: until then the fields below belong to the job.
  void work(int self) noexcept {
    Shares pieces(*this, self);
    in_job = true;
    try {
      fn_(context_, pieces);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
    in_job = false;
  }

  bool enter() {
    uint32_t gate = gate_.load(std::memory_order_acquire);
    while (gate & kOpen) {
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void worker_loop(int self) {
    uint32_t seen = 0;
    for (;;) {
      wait_for_change(job_, seen, workers_parked_);
      seen = job_.load(std::memory_order_acquire);
      if (stopping_) return;
      if (!enter()) continue;
      work(self);
      gate_.fetch_sub(1);
      if (caller_parked_.load() > 0) futex_wake_all(&gate_);
    }
  }

  std::vector<Share> shares_;
  std::vector<std::thread> workers_;
  PiecesFn fn_ = nullptr;
  void* context_ = nullptr;
  uint32_t grain_ = 1;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // written by the thread that set failed_, read when all have left the gate
  std::atomic<bool> stopping_{false};
  alignas(128) std::atomic<uint32_t> job_{0};  // changes with every job
  std::atomic<int> workers_parked_{0};
  alignas(128) std::atomic<uint32_t> gate_{0};  // kOpen | number of workers inside the job
  std::atomic<int> caller_parked_{0};
};

// A job as one piece.
class Whole final : public Pieces {
 public:
  explicit Whole(int64_t n) : left_(n) {}

  bool next(int64_t* begin, int64_t* end) override {
    *begin = 0;
    *end = left_;
    left_ = 0;
    return *end > 0;
  }

 private:
  int64_t left_;
};

std::mutex pool_mutex;
std::unique_ptr<Pool> pool;
std::atomic<int> wanted_threads{0};  // 0: not known yet. Read without the mutex, which is held during a job.

int default_threads() {
  if (const char* text = std::getenv("FASTDEPLOY_CPU_THREADS")) {
    const int n = std::atoi(text);
    if (n > 0) return n;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

void set_num_threads(int n) {
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted_threads = n > 0 ? n : default_threads();
  pool.reset();
}

void end_workers() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  pool.reset();
}

int num_threads() {
  if (wanted_threads == 0) wanted_threads = default_threads();
  return wanted_threads;
}

void run_pieces(int64_t n, int64_t grain, PiecesFn fn, void* context) {
  if (n <= 0) return;
  std::unique_lock<std::mutex> lock(pool_mutex, std::defer_lock);
  if (n <= grain || wanted_threads == 1 || in_job || !lock.try_lock()) {
    Whole pieces(n);
    fn(context, pieces);
    return;
  }
  if (pool == nullptr) {
    if (wanted_threads == 0) wanted_threads = default_threads();
    pool = std::make_unique<Pool>(wanted_threads);
  }
  pool->run(n, grain, fn, context);
}

}  // namespace fd
