// The shrink of adapters on vectors, from rows of float32. All functions are static: simd.h gives the reason.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

// t [Rows, stride] = x @ A.T * scaling for a tile of ranks. Each element is two chains, of the even and the odd k.
template <int Rows>
static void shrink_rows(const Lora& lora, int64_t tile, const float* x, int64_t ldx, float* t, int64_t stride) {
  const Weight& a = lora.a;
  const uint16_t* pairs = static_cast<const uint16_t*>(a.data) + tile * a.tile_elements();
  const float* singles = static_cast<const float*>(a.data) + tile * a.tile_elements();
  Floats16 even[Rows], odd[Rows];
  for (int r = 0; r < Rows; ++r) even[r] = odd[r] = zero();
  const int64_t paired = a.k_padded / 2 * 2;
  for (int64_t k = 0; k < paired; k += 2) {
    const Pairs w = a.bf16 ? load_pairs(pairs + k * 16) : Pairs{load(singles + k * 16), load(singles + k * 16 + 16)};
    for (int r = 0; r < Rows; ++r) {
      even[r] = fma(set1(x[r * ldx + k]), w.low, even[r]);
      odd[r] = fma(set1(x[r * ldx + k + 1]), w.high, odd[r]);
    }
  }
  const Floats16 scaling = load(lora.scaling() + tile * 16);
  for (int r = 0; r < Rows; ++r) {
    if (paired < a.k_padded) even[r] = fma(set1(x[r * ldx + paired]), load(singles + paired * 16), even[r]);
    store(t + r * stride + tile * 16, mul(add(even[r], odd[r]), scaling));
  }
}

}  // namespace FD_ISA
}  // namespace fd
