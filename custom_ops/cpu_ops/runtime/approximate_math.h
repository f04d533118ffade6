// Approximations on 16 lanes for results that are rounded to bfloat16 (8 significant bits).
// For instruction sets with AVX-512. All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

// 2^x for x <= 127, within 3e-6 and exactly 1 at 0; NaN stays NaN. Below -126 the result is denormal, which takes a
// hundred times as long, unless FlushDenormals makes it 0.
//
// 2^x = 2^n 2^r with n the integer below x and r in [0, 1). The polynomial for 2^r is the quartic of value 1 at 0 whose
// largest relative error on [0, 1] is least (2.9e-6). Found by Lawson's algorithm: least squares on 20001 points, the
// weight of each point multiplied by its error until all errors are level.
static inline __m512 approximate_exp2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.34267034e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.22424511e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.41280218e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93044840e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // takes the integer below x
}

// While one exists, results of this thread that are denormal are 0.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  FlushDenormals(const FlushDenormals&) = delete;
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// x / (1 + 2^power).
static inline __m512 approximate_gate(__m512 x, __m512 power) {
  const __m512 t = _mm512_min_ps(_mm512_max_ps(power, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(126.0f));
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), approximate_exp2(t));
  const __m512 guess = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(x, _mm512_mul_ps(guess, _mm512_fnmadd_ps(d, guess, _mm512_set1_ps(2.0f))));
}

// x / (1 + e^-x), within 1e-5.
static inline __m512 approximate_silu(__m512 x) {
  return approximate_gate(x, _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
}

// gelu_tanh of simd.h, within 2e-5 where the result is above 1e-30.
static inline __m512 approximate_gelu_tanh(__m512 x) {
  const __m512 factor =
      _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(-1.02943240e-1f), _mm512_set1_ps(-2.30220819f));
  return approximate_gate(x, _mm512_mul_ps(x, factor));
}

// swiglu_clamped of simd.h, within 1e-5.
static inline __m512 approximate_swiglu_clamped(__m512 gate, __m512 up) {
  const __m512 limit = _mm512_set1_ps(kSwigluLimit), least = _mm512_set1_ps(-kSwigluLimit);
  const __m512 g = _mm512_min_ps(limit, gate), u = _mm512_max_ps(least, _mm512_min_ps(limit, up));
  const __m512 activated = approximate_gate(g, _mm512_mul_ps(g, _mm512_set1_ps(-kSwigluAlpha * 1.44269504f)));
  return _mm512_mul_ps(activated, _mm512_add_ps(u, _mm512_set1_ps(1.0f)));
}

}  // namespace FD_ISA
}  // namespace fd
