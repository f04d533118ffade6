// Sixteen float32 lanes: one AVX-512 register or two AVX2 registers. Kernels are written once on this type and compiled
// once per instruction set (FD_ISA is the namespace); both give the same bits, since lanes and order are the same.
//
// Everything here is static: files that include this one are compiled with different -m flags, and the linker could
// choose a version of a shared inline function that this CPU cannot run.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace fd {
namespace FD_ISA {

using Mask = uint32_t;  // bit i = lane i

#if defined(__AVX512F__)

struct Floats16 {
  __m512 v;
};

static inline Floats16 zero() { return {_mm512_setzero_ps()}; }
static inline Floats16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline Floats16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Floats16 a) { _mm512_storeu_ps(p, a.v); }
static inline Floats16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
static inline void store_n(float* p, Floats16 a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
static inline Floats16 add(Floats16 a, Floats16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats16 sub(Floats16 a, Floats16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Floats16 mul(Floats16 a, Floats16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats16 div(Floats16 a, Floats16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Floats16 fma(Floats16 a, Floats16 b, Floats16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Floats16 fnma(Floats16 a, Floats16 b, Floats16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// Returns b where either is NaN, as the instruction does.
static inline Floats16 max(Floats16 a, Floats16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Floats16 min(Floats16 a, Floats16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Mask greater(Floats16 a, Floats16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
static inline Mask greater_equal(Floats16 a, Floats16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
static inline Mask equal(Floats16 a, Floats16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
static inline Floats16 select(Mask m, Floats16 yes, Floats16 no) {
  return {_mm512_mask_blend_ps((__mmask16)m, no.v, yes.v)};
}
static inline Floats16 round(Floats16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for integral n in [-126, 127].
static inline Floats16 pow2(Floats16 n) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
// Sixteen pairs of bfloat16, split into the first and the second of each pair.
struct Pairs {
  Floats16 low, high;
};
static inline Pairs load_pairs(const uint16_t* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
}
// Rounds to the nearest bfloat16 (ties to even), kept in a float. NaN stays NaN.
static inline Floats16 round_bf16(Floats16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_mask_blend_ps(nan, _mm512_castsi512_ps(kept), a.v)};
}
// Stores sixteen values, rounded to bfloat16.
static inline void store_bf16(uint16_t* p, Floats16 a) {
  const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(a).v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bits));
}
// Stores sixteen values, rounded to bfloat16, as the first or the second of sixteen pairs. The other half, which
// another thread may be writing, is not touched.
static inline void store_half_pairs(uint16_t* p, Floats16 a, bool high) {
  const __m512i bits = _mm512_castps_si512(round_bf16(a).v);
  if (high) {
    _mm512_mask_storeu_epi16(p, 0xaaaaaaaa, bits);
  } else {
    _mm512_mask_storeu_epi16(p, 0x55555555, _mm512_srli_epi32(bits, 16));
  }
}
// Both instruction sets halve the same way: 16 -> 8 -> 4 -> 2 -> 1 lanes, lane i with lane i + half.
static inline __m256 lower_half(Floats16 a) { return _mm512_castps512_ps256(a.v); }
static inline __m256 upper_half(Floats16 a) { return _mm512_extractf32x8_ps(a.v, 1); }

// rows [16][16]: what reduce_add and reduce_max return for each of the first `count` rows, in its lane. Each step
// combines the halves of two vectors of partial results into one vector, so all 16 rows take 15 combinations.
template <typename Combine>
static inline Floats16 reduce_rows(const float* rows, Combine combine) {
  const __m512i other_quarter = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  Floats16 quads[4];  // of rows i, i + 4, i + 8 and i + 12: 4 partial results each
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; ++i) {
    __m512 eights[2];  // of rows i and i + 8, then of i + 4 and i + 12
#pragma GCC unroll 2
    for (int64_t j = 0; j < 2; ++j) {
      const __m512 a = load(rows + (i + 4 * j) * 16).v, b = load(rows + (i + 4 * j + 8) * 16).v;
      eights[j] = combine({_mm512_mask_blend_ps(0xff00, a, b)}, {_mm512_shuffle_f32x4(a, b, 0x4e)}).v;
    }
    quads[i] = combine({_mm512_mask_blend_ps(0xf0f0, eights[0], eights[1])},
                       {_mm512_permutex2var_ps(eights[0], other_quarter, eights[1])});
  }
  __m512 pairs[2];
#pragma GCC unroll 2
  for (int64_t i = 0; i < 2; ++i) {
    const __m512 a = quads[2 * i].v, b = quads[2 * i + 1].v;
    pairs[i] = combine({_mm512_mask_blend_ps(0xcccc, a, b)}, {_mm512_shuffle_ps(a, b, 0x4e)}).v;
  }
  return combine({_mm512_shuffle_ps(pairs[0], pairs[1], 0x88)}, {_mm512_shuffle_ps(pairs[0], pairs[1], 0xdd)});
}
static inline Floats16 reduce_add_rows(const float* rows, int64_t) { return reduce_rows(rows, add); }
static inline Floats16 reduce_max_rows(const float* rows, int64_t) { return reduce_rows(rows, max); }

#else

struct Floats16 {
  __m256 lo, hi;
};

static inline Floats16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Floats16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Floats16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Floats16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline Floats16 load_n(const float* p, int n) {
  if (n == 16) return load(p);
  alignas(32) float padded[16] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * 4);
  return load(padded);
}
static inline void store_n(float* p, Floats16 a, int n) {
  if (n == 16) return store(p, a);
  alignas(32) float all[16];
  store(all, a);
  std::memcpy(p, all, static_cast<size_t>(n) * 4);
}
static inline Floats16 add(Floats16 a, Floats16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Floats16 sub(Floats16 a, Floats16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Floats16 mul(Floats16 a, Floats16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Floats16 div(Floats16 a, Floats16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Floats16 fma(Floats16 a, Floats16 b, Floats16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Floats16 fnma(Floats16 a, Floats16 b, Floats16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Floats16 max(Floats16 a, Floats16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Floats16 min(Floats16 a, Floats16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
template <int Op>
static inline Mask compare(Floats16 a, Floats16 b) {
  const Mask lo = static_cast<Mask>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, Op)));
  const Mask hi = static_cast<Mask>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, Op)));
  return lo | (hi << 8);
}
static inline Mask greater(Floats16 a, Floats16 b) { return compare<_CMP_GT_OQ>(a, b); }
static inline Mask greater_equal(Floats16 a, Floats16 b) { return compare<_CMP_GE_OQ>(a, b); }
static inline Mask equal(Floats16 a, Floats16 b) { return compare<_CMP_EQ_OQ>(a, b); }
static inline __m256 mask_bits(Mask m) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(m)), bit);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
}
static inline Floats16 select(Mask m, Floats16 yes, Floats16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, mask_bits(m & 0xff)), _mm256_blendv_ps(no.hi, yes.hi, mask_bits(m >> 8))};
}
static inline Floats16 round(Floats16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
static inline __m256 pow2_half(__m256 n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
static inline Floats16 pow2(Floats16 n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
struct Pairs {
  Floats16 low, high;
};
static inline Pairs load_pairs(const uint16_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i top = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, top)), _mm256_castsi256_ps(_mm256_and_si256(b, top))}};
}
static inline __m256 round_bf16_half(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i kept = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(kept), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static inline Floats16 round_bf16(Floats16 a) { return {round_bf16_half(a.lo), round_bf16_half(a.hi)}; }
static inline void store_bf16(uint16_t* p, Floats16 a) {
  const Floats16 rounded = round_bf16(a);
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(rounded.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(rounded.hi), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);  // packed within 128-bit lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
static inline void store_half_pairs(uint16_t* p, Floats16 a, bool high) {
  alignas(32) uint16_t all[16];
  store_bf16(all, a);
  for (int i = 0; i < 16; ++i) p[i * 2 + high] = all[i];
}
static inline __m256 lower_half(Floats16 a) { return a.lo; }
static inline __m256 upper_half(Floats16 a) { return a.hi; }

#endif

static inline float reduce_add(Floats16 a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float reduce_max(Floats16 a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#if !defined(__AVX512F__)
static inline Floats16 reduce_add_rows(const float* rows, int64_t count) {
  alignas(32) float all[16] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = reduce_add(load(rows + i * 16));
  return load(all);
}
static inline Floats16 reduce_max_rows(const float* rows, int64_t count) {
  alignas(32) float all[16] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = reduce_max(load(rows + i * 16));
  return load(all);
}
#endif

// e^r for |r| <= ln(2) / 2, by its Taylor series.
static inline Floats16 exp_of_remainder(Floats16 r) {
  Floats16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  return fma(p, r, set1(1.0f));
}

// e^x within 2 ulp; exactly 0 below -87.3 (where the result would be denormal) and exactly 1 at 0; NaN stays NaN.
static inline Floats16 exp(Floats16 x) {
  const Floats16 lowest = set1(-87.3f);
  const Mask in_range = ~greater(lowest, x) & 0xffff;
  const Floats16 clamped = min(set1(88.0f), max(lowest, x));
  const Floats16 n = round(mul(clamped, set1(1.44269504f)));
  const Floats16 r = fnma(n, set1(0.693359375f), clamped);  // ln 2 in two parts
  return select(in_range, mul(exp_of_remainder(fnma(n, set1(-2.12194440e-4f), r)), pow2(n)), zero());
}

// 2^x within 2 ulp for x <= 126; exactly 0 below -126 and exactly 1 at 0; NaN stays NaN.
static inline Floats16 exp2(Floats16 x) {
  const Floats16 lowest = set1(-126.0f);
  const Mask in_range = ~greater(lowest, x) & 0xffff;
  const Floats16 clamped = max(lowest, x), n = round(clamped);
  return select(in_range, mul(exp_of_remainder(mul(sub(clamped, n), set1(0.693147181f))), pow2(n)), zero());
}

static inline Floats16 silu(Floats16 x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x / 2 * (1 + tanh(y / 2)) = x / (1 + e^-y) with y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
static inline Floats16 gelu_tanh(Floats16 x) {
  const Floats16 y = mul(x, fma(mul(x, x), set1(7.13548163e-2f), set1(1.59576912f)));
  return div(x, add(set1(1.0f), exp(sub(zero(), y))));
}

// The SwiGLU of gpt-oss (GptOssExperts of transformers): g / (1 + e^-1.702g) * (u + 1), where g is the gate, at most 7,
// and u is up, between -7 and 7. NaN stays NaN.
constexpr float kSwigluLimit = 7.0f, kSwigluAlpha = 1.702f;

static inline Floats16 swiglu_clamped(Floats16 gate, Floats16 up) {
  const Floats16 g = min(set1(kSwigluLimit), gate), u = max(set1(-kSwigluLimit), min(set1(kSwigluLimit), up));
  const Floats16 activated = div(g, add(set1(1.0f), exp(mul(g, set1(-kSwigluAlpha)))));
  return mul(activated, add(u, set1(1.0f)));
}

}  // namespace FD_ISA
}  // namespace fd
