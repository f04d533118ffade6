// What a linear multiplies its weight with, and the steps of a decoder layer in these terms. One implementation per
// instruction set: linear.cc (vectors) and linear_amx.cc (tiles), each with a layout of its own.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace fd {
namespace FD_ISA {

// Rows of activations in the left operand's own layout, rounded to bfloat16 where the weight is; in a scratch slot.
struct Left {
  const void* data;
  int64_t m;
};

// x [m, k]; with `norm` [k], RMSNorm(x) instead.
Left make_left(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m, const Weight& w);

// out [m, n] = left @ w.T + bias, or += without touching it otherwise.
void multiply(const Left& left, const Weight& w, float* out, bool accumulate);

// silu(left @ gate.T) * (left @ up.T), of a weight that packs gate, then up, each of whole column tiles: already the
// left operand of `next`.
Left multiply_gated(ScratchSlot slot, const Left& left, const Weight& gate_up, const Weight& next);

// 1 / sqrt(mean(x^2) + eps), summed in 16 lanes and four chains, combined in a fixed order.
static inline float norm_factor(const float* x, int64_t h, float eps) {
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= h; i += 64)
    for (int c = 0; c < 4; ++c) {
      const F16 v = load(x + i + 16 * c);
      sums[c] = fma(v, v, sums[c]);
    }
  for (int c = 0; i < h; i += 16, ++c) {
    const F16 v = load_n(x + i, static_cast<int>(h - i < 16 ? h - i : 16));
    sums[c] = fma(v, v, sums[c]);
  }
  const float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / std::sqrt(sum / static_cast<float>(h) + eps);
}

static inline F16 with_bias(const Weight& w, int64_t tile, F16 value) {
  return w.bias == nullptr ? value : add(value, load(w.bias + tile * kColumns));
}

// Columns [16 tile, 16 tile + 16) of a row of n, those that exist.
static inline void store_columns(float* row, int64_t tile, int64_t n, F16 value) {
  const int64_t column = tile * kColumns;
  if (column + kColumns <= n) {
    store(row + column, value);
  } else if (column < n) {
    store_n(row + column, value, static_cast<int>(n - column));
  }
}

static inline void add_columns(float* row, int64_t tile, int64_t n, F16 value) {
  const int64_t column = tile * kColumns;
  if (column + kColumns <= n) {
    store(row + column, add(load(row + column), value));
  } else if (column < n) {
    const int count = static_cast<int>(n - column);
    store_n(row + column, add(load_n(row + column, count), value), count);
  }
}

}  // namespace FD_ISA
}  // namespace fd
