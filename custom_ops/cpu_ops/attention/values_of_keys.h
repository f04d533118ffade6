// Values of a cache of one part: 16 keys in the layout of values (kernels.h). All values are finite: a number that is
// not finite marks a key (attention/prepare.cc), is its first one, and becomes 0.
//
// Cost: some 0.6 instructions for each number, for all rows of a task (up to 128), which do two multiplications of 16
// lanes or less with it each.
// All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "attention/tasks.h"
#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

// Loads 8 rows of 8 numbers of 32 bits, `stride` numbers apart, as columns.
static inline void load_columns(const float* from, int64_t stride, __m256 (&columns)[8]) {
  __m256 halves[8];  // rows i and i + 4: numbers 0 to 3, then 4 to 7
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t half = 0; half < 2; ++half) {
      const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(from + i * stride + half * 4));
      halves[half * 4 + i] = _mm256_insertf128_ps(low, _mm_loadu_ps(from + (i + 4) * stride + half * 4), 1);
    }
  for (int64_t half = 0; half < 8; half += 4) {
    const __m256 low01 = _mm256_unpacklo_ps(halves[half], halves[half + 1]),
                 high01 = _mm256_unpackhi_ps(halves[half], halves[half + 1]),
                 low23 = _mm256_unpacklo_ps(halves[half + 2], halves[half + 3]),
                 high23 = _mm256_unpackhi_ps(halves[half + 2], halves[half + 3]);
    columns[half] = _mm256_shuffle_ps(low01, low23, 0x44);
    columns[half + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    columns[half + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    columns[half + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
}

// keys [Dp][16] -> values [16][Dp].
static inline void values_of_keys(const float* keys, int64_t padded, float* values) {
  for (int64_t d = 0; d < padded; d += 8)
    for (int64_t slot = 0; slot < kUnit; slot += 8) {
      __m256 columns[8];
      load_columns(keys + d * kUnit + slot, kUnit, columns);
      for (int64_t i = 0; i < 8; ++i) _mm256_storeu_ps(values + (slot + i) * padded + d, columns[i]);
    }
  for (int64_t slot = 0; slot < kUnit; ++slot)
    if (std::isnan(values[slot * padded])) values[slot * padded] = 0.0f;
}

// keys [Dp / 2][16][2] -> values [8][Dp][2].
static inline void values_of_keys(const uint16_t* keys, int64_t padded, uint16_t* values) {
  const float* pairs = reinterpret_cast<const float*>(keys);  // of dims; only moved
  for (int64_t d = 0; d < padded; d += 16)
    for (int64_t slot = 0; slot < kUnit; slot += 8) {
      __m256 columns[8];  // a slot each, 16 dims
      load_columns(pairs + d / 2 * kUnit + slot, kUnit, columns);
      for (int64_t i = 0; i < 8; i += 2) {
        const __m256i even = _mm256_castps_si256(columns[i]), odd = _mm256_castps_si256(columns[i + 1]);
        const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
        auto* to = reinterpret_cast<__m256i*>(values + ((slot + i) * padded) + d * 2);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
      }
    }
  constexpr uint16_t kInfinity = 0x7f80;  // numbers above it, without the sign, are NaN
  for (int64_t slot = 0; slot < kUnit; ++slot) {
    uint16_t& first = values[slot / 2 * 2 * padded + slot % 2];
    if ((first & 0x7fff) > kInfinity) first = 0;
  }
}

}  // namespace FD_ISA
}  // namespace fd
