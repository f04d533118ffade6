// The rate of AMX tiles with all operands in registers, for benchmarks/ops.py, and parts of the kernels for their
// tests.
#include <immintrin.h>

#include "kernels.h"
#include "runtime/amx_tiles.h"
#include "runtime/approximate_math.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace amx {

int64_t probe_peak(int64_t rounds) {
  constexpr int64_t kTasks = 64;
  parallel_for(kTasks, 1, [&](int64_t begin, int64_t end) {
    configure_tiles(16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < (end - begin) * rounds; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  });
  return kTasks * rounds * 4 * 2 * 16 * 16 * 32;
}

void probe_exp2(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
    _mm512_mask_storeu_ps(out + i, lanes, approximate_exp2(_mm512_maskz_loadu_ps(lanes, x + i)));
  }
}

void probe_silu(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
    _mm512_mask_storeu_ps(out + i, lanes, approximate_silu(_mm512_maskz_loadu_ps(lanes, x + i)));
  }
}

}  // namespace amx
}  // namespace fd
