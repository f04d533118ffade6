// Linears: their input in the layout of the kernels, and products with a packed weight. One implementation per
// instruction set: linear.cc (vectors of float32), linear_bf16.cc (VDPBF16PS) or linear_amx.cc (AMX tiles), each with
// an input layout of its own.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "linear/lora.h"
#include "linear/with_rows.h"
#include "runtime/memory.h"
#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

// Converts x [m, k], or RMSNorm(x) where `norm` [k] is not null. The input is rounded to bfloat16 if the weight is
// bfloat16.
LinearInput make_linear_input(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m,
                              const Weight& w);

// out [m, n] = input @ w.T + bias + adapters; with `accumulate`, the result is added to out.
void multiply(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate);

// Computes the activation of input @ gate.T and input @ up.T, with biases and adapters, as the input of `next`. The
// weight packs gate, then up, each of whole column tiles.
LinearInput multiply_gated(ScratchSlot slot, const LinearInput& input, const Weight& gate_up, const LoraRows& loras,
                           Activation activation, const Weight& next);

// Pairs of column tiles that are computed together: neighbours, of which the last may be alone; or the same tile of
// both halves.
struct Neighbours {
  int64_t tiles;

  int64_t count() const { return (tiles + 1) / 2; }
  int64_t first(int64_t pair) const { return 2 * pair; }
  int64_t second(int64_t pair) const { return 2 * pair + 1 < tiles ? 2 * pair + 1 : tiles - 1; }
};
struct Halves {
  int64_t half;

  int64_t count() const { return half; }
  int64_t first(int64_t pair) const { return pair; }
  int64_t second(int64_t pair) const { return pair + half; }
};

// 1 / sqrt(mean(x^2) + eps), summed in 16 lanes and four chains, combined in a fixed order.
static inline float norm_factor(const float* x, int64_t h, float eps) {
  Floats16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= h; i += 64)
    for (int c = 0; c < 4; ++c) {
      const Floats16 v = load(x + i + 16 * c);
      sums[c] = fma(v, v, sums[c]);
    }
  for (int c = 0; i < h; i += 16, ++c) {
    const Floats16 v = load_n(x + i, static_cast<int>(h - i < 16 ? h - i : 16));
    sums[c] = fma(v, v, sums[c]);
  }
  const float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / std::sqrt(sum / static_cast<float>(h) + eps);
}

static inline Floats16 gated(Activation activation, Floats16 gate, Floats16 up) {
  if (activation == kSwigluClamped) return swiglu_clamped(gate, up);
  return mul(activation == kGeluTanh ? gelu_tanh(gate) : silu(gate), up);
}

// Adds bias and adapter to a product.
static inline Floats16 complete(const Weight& w, const Expansion& expansion, int64_t row, int64_t tile,
                                Floats16 value) {
  if (w.bias != nullptr) value = add(value, load(w.bias + tile * kColumns));
  return expansion.add_to(value, row, tile);
}

// The same for rows [first, first + count) and two column tiles; values: float32 [count][2][16].
static inline void complete_rows(const Weight& w, const Expansion& expansion, int64_t first, int64_t count,
                                 int64_t tile0, int64_t tile1, float* values) {
  if (w.bias != nullptr) {
    const Floats16 bias0 = load(w.bias + tile0 * kColumns), bias1 = load(w.bias + tile1 * kColumns);
    for (float* v = values; v < values + count * 2 * kColumns; v += 2 * kColumns) {
      store(v, add(load(v), bias0));
      store(v + kColumns, add(load(v + kColumns), bias1));
    }
  }
  if (expansion.shrunk != nullptr) expansion.add_to_rows(values, first, count, tile0, tile1);
}

// Stores columns [16 tile, 16 tile + 16) of a row of n columns; columns from n on are dropped.
static inline void store_columns(float* row, int64_t tile, int64_t n, Floats16 value) {
  const int64_t column = tile * kColumns;
  if (column + kColumns <= n) {
    store(row + column, value);
  } else if (column < n) {
    store_n(row + column, value, static_cast<int>(n - column));
  }
}

// The same, but adds to what is there.
static inline void add_columns(float* row, int64_t tile, int64_t n, Floats16 value) {
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
