// A small persistent pool: the calling thread and its workers share out ranges of independent items.
#pragma once

#include <cstdint>

namespace fd {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Number of threads that run ranges, the caller included.
int num_threads();

// Replaces the pool (tests, start-up). Must not run beside an op. n <= 0: FASTDEPLOY_CPU_THREADS, else all cores
// that the process may use.
void set_num_threads(int n);

// Runs fn over [0, n) in pieces of at most `grain` items, on all threads; returns when all is done. Each thread starts
// on a contiguous share (so weights stream in order) and, once through, takes pieces from the end of another's. If the
// pool is busy with another caller's job, everything runs on the calling thread.
void run_ranges(int64_t n, int64_t grain, RangeFn fn, void* context);

template <typename Body>
inline void parallel_for(int64_t n, int64_t grain, Body body) {
  run_ranges(
      n, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); }, &body);
}

}  // namespace fd
