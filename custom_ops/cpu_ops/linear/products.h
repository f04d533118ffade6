// Products of the linears of a block: by the kernels of linear.h, or by those of linear_int8.h for a weight with int8
// values. All functions are static: runtime/simd.h gives the reason.
#pragma once

#include "linear/linear.h"
#include "linear/linear_int8.h"

namespace fd {
namespace FD_ISA {

static inline float* floats(ScratchSlot slot, int64_t count) {
  return static_cast<float*>(scratch(slot, static_cast<size_t>(count) * 4));
}

// Columns [first, first + count) of a weight, both multiples of 16.
static inline Weight columns_of(const Weight& w, int64_t first, int64_t count) {
  const int64_t tile = first / kColumns;
  Weight found = w;
  found.n = count;
  found.data = static_cast<char*>(w.data) + tile * w.tile_elements() * (w.bf16 ? 2 : 4);
  if (w.bias != nullptr) found.bias = w.bias + tile * kColumns;
  if (w.int8 != nullptr) found.int8 = w.int8 + tile * w.int8_tile_bytes();
  return found;
}

// All linears of a block that multiply the same input have int8 values, or none has.
static inline LinearInput input_of(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m,
                                   const Weight& w) {
  return (w.int8 == nullptr ? make_linear_input : int8_linears().make_input)(slot, x, norm, eps, m, w);
}

static inline void product(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out,
                           bool accumulate) {
  (w.int8 == nullptr ? multiply : int8_linears().multiply)(input, w, loras, out, accumulate);
}

// multiply_gated of any width. Where gate and up share a column tile, both products are stored before they are
// combined.
static inline LinearInput gated_product(ScratchSlot slot, const LinearInput& input, const Weight& w,
                                        const LoraRows& loras, Activation activation, const Weight& next) {
  const int64_t half = w.n / 2;
  if (half % kColumns == 0)
    return (w.int8 == nullptr ? multiply_gated : int8_linears().multiply_gated)(slot, input, w, loras, activation,
                                                                                next);
  float* both = floats(kScratchGateUp, input.m * w.n);
  product(input, w, loras, both, false);
  for (int64_t r = 0; r < input.m; ++r)
    for (int64_t i = 0; i < half; i += 16) {
      const int count = static_cast<int>(half - i < 16 ? half - i : 16);
      const float *gate = both + r * w.n + i, *up = gate + half;
      const Floats16 inner = gated(activation, load_n(gate, count), load_n(up, count));
      store_n(both + r * half + i, inner, count);  // after all reads
    }
  return input_of(slot, both, nullptr, 0, input.m, next);
}

}  // namespace FD_ISA
}  // namespace fd
