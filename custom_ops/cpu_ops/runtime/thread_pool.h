// A small persistent pool: the calling thread and its workers share ranges of independent items.
#pragma once

#include <cstdint>

namespace fd {

// The pieces of a job for one thread: its own share first, front to back, then pieces from the end of other shares.
class Pieces {
 public:
  // Takes the next piece, [*begin, *end) of at most `grain` items; false when nothing is left.
  virtual bool next(int64_t* begin, int64_t* end) = 0;

 protected:
  ~Pieces() = default;
};

using PiecesFn = void (*)(void* context, Pieces& pieces);

// Number of threads that run jobs, the caller included.
int num_threads();

// Replaces the pool (tests, start-up). No op may be running. n <= 0: FASTDEPLOY_CPU_THREADS, else all cores that the
// process may use.
void set_num_threads(int n);

// Ends the workers and frees their scratch; the next job starts new ones. No op may be running.
void end_workers();

// Divides [0, n) into pieces of at most `grain` items and calls fn once on each thread that takes part (a thread that
// wakes up late does not). When this returns, no thread is in fn any more. Each thread starts on a contiguous share, so
// that weights are read in order. The calling thread runs the whole job as one piece if it is no more than one piece,
// if it is in a job itself, or if the pool is busy with the job of another caller. If fn throws on any thread, the
// first exception is thrown here.
void run_pieces(int64_t n, int64_t grain, PiecesFn fn, void* context);

// Calls body(pieces) on each thread: for work that keeps something (tile registers, a pending result) between pieces.
template <typename Body>
inline void parallel_pieces(int64_t n, int64_t grain, Body body) {
  run_pieces(n, grain, [](void* context, Pieces& pieces) { (*static_cast<Body*>(context))(pieces); }, &body);
}

// Calls body(begin, end) for each piece.
template <typename Body>
inline void parallel_for(int64_t n, int64_t grain, Body body) {
  parallel_pieces(n, grain, [&](Pieces& pieces) {
    for (int64_t begin, end; pieces.next(&begin, &end);) body(begin, end);
  });
}

}  // namespace fd
