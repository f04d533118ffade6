// The rate of VDPBF16PS with all operands in registers, for benchmarks/ops.py.
#include <immintrin.h>

#include "kernels.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace avx512_bf16 {

// 16 chains keep two units with a latency of 6 cycles busy; 12 lose some 6 % on Zen 5. Each has sums of its own: a
// compiler would merge equal chains, and keeps more than 16 in memory.
int64_t probe_peak(int64_t rounds) {
  constexpr int kChains = 16;
  constexpr int64_t kTasks = 64, kPerRound = 64;
  int64_t kept = 0;
  parallel_for(kTasks, 1, [&](int64_t begin, int64_t end) {
    __m512 sums[kChains];
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_set1_ps(static_cast<float>(c));
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32(0x00000001);
    for (int64_t i = 0; i < (end - begin) * rounds * kPerRound; ++i) {
      __asm__("" : "+v"(a), "+v"(b));  // not known to be the same in each round
      for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], a, b);
    }
    __m512 total = _mm512_setzero_ps();
    for (int c = 0; c < kChains; ++c) total = _mm512_add_ps(total, sums[c]);
    __atomic_fetch_add(&kept, static_cast<int64_t>(_mm512_reduce_add_ps(total)), __ATOMIC_RELAXED);
  });
  return kept == 0 ? 0 : kTasks * rounds * kPerRound * kChains * 16 * 2 * 2;
}

}  // namespace avx512_bf16
}  // namespace fd
