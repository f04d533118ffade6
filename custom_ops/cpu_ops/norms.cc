// RMSNorm, alone and after a residual addition. Compiled once per instruction set.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;  // about 2 us: below that, waking another core costs more

int64_t rows_per_task(int64_t h) { return std::max<int64_t>(1, kElementsPerTask / h); }

// Sum of squares over 16 lanes, four chains, combined in a fixed order.
float sum_of_squares(const float* x, int64_t h) {
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= h; i += 64)
    for (int c = 0; c < 4; ++c) {
      const F16 v = load(x + i + 16 * c);
      sums[c] = fma(v, v, sums[c]);
    }
  for (int c = 0; i < h; i += 16, ++c) {
    const F16 v = load_n(x + i, static_cast<int>(std::min<int64_t>(16, h - i)));
    sums[c] = fma(v, v, sums[c]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

void normalize(const float* x, const float* weight, float* out, int64_t h, float eps) {
  const F16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, h) / static_cast<float>(h) + eps));
  int64_t i = 0;
  for (; i + 16 <= h; i += 16) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < h) {
    const int n = static_cast<int>(h - i);
    store_n(out + i, mul(mul(load_n(x + i, n), factor), load_n(weight + i, n)), n);
  }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, int64_t m, int64_t h, float eps) {
  parallel_for(m, rows_per_task(h), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) normalize(x + r * h, weight, out + r * h, h, eps);
  });
}

void add_rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t m, int64_t h, float eps) {
  parallel_for(m, rows_per_task(h), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = x + r * h;
      float* sum = residual + r * h;
      int64_t i = 0;
      for (; i + 16 <= h; i += 16) store(sum + i, add(load(sum + i), load(from + i)));
      for (; i < h; ++i) sum[i] += from[i];
      normalize(sum, weight, out + r * h, h, eps);
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
