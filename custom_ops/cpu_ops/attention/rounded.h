// Operands rounded to bfloat16, for instruction sets that multiply pairs of it: queries and probabilities are rounded
// like the keys and values of the cache. VDPBF16PS and TDPBF16PS take denormals as 0 and add to a float32 first the
// product of the second of a pair, then that of the first, each rounded to nearest; denormal sums become 0.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "runtime/approximate_math.h"
#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

struct Rounded {
  using Element = uint16_t;
  using Left = uint16_t;

  static void prepare(const AttentionArgs& a, uint16_t* query) { avx512::prepare_attention(a, query, true); }

  using Mode = FlushDenormals;

  // 2^x for x <= 0; exactly 0 below -126; NaN stays NaN.
  static Floats16 power_of_2(Floats16 x) { return {approximate_exp2(x.v)}; }

  // Stores the weights of 64 keys, rounded.
  static void store_weights(const Floats16* p, uint16_t* to) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1].v, p[0].v));
    _mm512_storeu_si512(to + 32, (__m512i)_mm512_cvtne2ps_pbh(p[3].v, p[2].v));
  }
};

}  // namespace FD_ISA
}  // namespace fd
