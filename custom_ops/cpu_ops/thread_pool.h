// A small persistent pool: the calling thread and its workers share out ranges of independent items.
#pragma once

#include <cstdint>

namespace fd {

// One thread's way through a job: its own share first, front to back, then pieces off the end of the others'.
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

// Replaces the pool (tests, start-up). Must not run beside an op. n <= 0: FASTDEPLOY_CPU_THREADS, else all cores
// that the process may use.
void set_num_threads(int n);

// Ends the workers, and with them their scratch; the next job starts others. Must not run beside an op.
void end_workers();

// Shares [0, n) out in pieces of at most `grain` items; fn is called once on each thread that takes part (one that
// wakes up late does not), and none is in it any more when this returns. Each thread starts on a contiguous share, so
// that weights stream in order. What is no more than one piece, or meets a pool that is busy with another caller's job,
// runs on the calling thread, as one piece of any size. What fn throws on any thread is thrown here, the first of them.
void run_pieces(int64_t n, int64_t grain, PiecesFn fn, void* context);

// body(pieces): for work that carries something (tile registers, a result not yet written) from piece to piece.
template <typename Body>
inline void parallel_pieces(int64_t n, int64_t grain, Body body) {
  run_pieces(n, grain, [](void* context, Pieces& pieces) { (*static_cast<Body*>(context))(pieces); }, &body);
}

// body(begin, end) for each piece.
template <typename Body>
inline void parallel_for(int64_t n, int64_t grain, Body body) {
  parallel_pieces(n, grain, [&](Pieces& pieces) {
    for (int64_t begin, end; pieces.next(&begin, &end);) body(begin, end);
  });
}

}  // namespace fd
