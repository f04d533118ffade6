// The input of int8 linears, and the product of some of its rows with two column tiles: on AVX512_VNNI or AVX2.
//
// A row is cut into groups of 64 k, each with a scale of its own, 2^-15 of its largest magnitude: x = scale * q, where
// q is an integer of 16 bits. The sum of q * w over a group is computed in integers, so it is exact, and the same in
// any order. The weights are stored as 128 + w, without a sign. So each sum begins at `start`, -128 times the sum of q.
//
//   AVX512_VNNI   q = 256 * high + low, both of 8 bits; VPDPBUSD multiplies 4 weights with 4 digits and adds them
//   AVX2          VPMADDWD multiplies 2 weights, widened to 16 bits, with 2 numbers q and adds them
//
// All functions are static: simd.h gives the reason.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "weights/quantize_group.h"

namespace fd {
namespace FD_ISA {

#if defined(__AVX512VNNI__)
constexpr int kRows = 12;  // of a product: 24 of 32 registers are sums
#else
constexpr int kRows = 2;  // of a product: 8 of 16 registers are sums
#endif

constexpr int64_t kQuads = kInt8Group / 4;
constexpr float kLargestInput = 32512.0f;  // 127 * 256, whose high digit is 127

// The rows of an input in blocks of equal width, at most kRows. Rows that fill up the last block are undefined, and so
// are their results.
//
//   AVX512_VNNI   digits [blocks][groups][high, low][16 quads][width][4]
//   AVX2          digits [blocks][groups][16 quads][width][4 numbers of 16 bits]
//   both          scales, then starts [blocks][groups][width]
class InputGroups {
 public:
  InputGroups(const void* data, int64_t m, const Weight& w)
      : groups_(w.groups()),
        blocks_(m > 0 ? (m + kRows - 1) / kRows : 1),
        width_((m + blocks_ - 1) / blocks_),
        digits_(static_cast<char*>(const_cast<void*>(data))),
        scales_(reinterpret_cast<float*>(digits_ + blocks_ * groups_ * group_bytes())),
        starts_(reinterpret_cast<int32_t*>(scales_ + blocks_ * groups_ * width_)) {}

  static size_t bytes(int64_t m, const Weight& w) {
    return static_cast<size_t>((m + kRows) * w.groups() * (2 * kInt8Group + 8));
  }

  int64_t groups() const { return groups_; }
  int64_t blocks() const { return blocks_; }
  int64_t width() const { return width_; }
  int64_t group_bytes() const { return 2 * kInt8Group * width_; }
  const char* digits(int64_t block, int64_t group) const { return digits_ + (block * groups_ + group) * group_bytes(); }
  const float* scales(int64_t block, int64_t group) const { return scales_ + (block * groups_ + group) * width_; }
  const int32_t* starts(int64_t block, int64_t group) const { return starts_ + (block * groups_ + group) * width_; }

  // x: the values of a group of a row.
  void put(int64_t row, int64_t group, const float* x) const {
    const int64_t at = row / width_ * groups_ + group, lane = row % width_;
    int32_t q[kInt8Group];
    starts_[at * width_ + lane] = -128 * quantize_group(x, kLargestInput, q, scales_ + at * width_ + lane);
    store(q, digits_ + at * group_bytes(), lane);
  }

  // The values of a row, [groups * 64].
  void get(int64_t row, float* x) const {
    const int64_t block = row / width_, lane = row % width_;
    for (int64_t g = 0; g < groups_; ++g, x += kInt8Group) load(digits(block, g), lane, scales(block, g)[lane], x);
  }

 private:
#if defined(__AVX512VNNI__)
  void store(const int32_t* q, char* to, int64_t lane) const {
    char digits[2][kInt8Group];
    for (int i = 0; i < kInt8Group; ++i) digits[0][i] = static_cast<char>((q[i] + 128) >> 8);
    for (int i = 0; i < kInt8Group; ++i) digits[1][i] = static_cast<char>(q[i]);
    const int64_t step = width_ * 4;  // `to` may alias width_
    to += lane * 4;
    for (int64_t i = 0; i < 2 * kQuads; ++i, to += step) std::memcpy(to, digits[0] + i * 4, 4);
  }
  void load(const char* from, int64_t lane, float scale, float* x) const {
    int8_t digits[2][kInt8Group];
    for (int64_t i = 0; i < 2 * kQuads; ++i) std::memcpy(digits[0] + i * 4, from + (i * width_ + lane) * 4, 4);
    for (int i = 0; i < kInt8Group; ++i) x[i] = static_cast<float>(digits[0][i] * 256 + digits[1][i]) * scale;
  }
#else
  void store(const int32_t* q, char* to, int64_t lane) const {
    int16_t numbers[kInt8Group];
    for (int i = 0; i < kInt8Group; ++i) numbers[i] = static_cast<int16_t>(q[i]);
    for (int64_t i = 0; i < kQuads; ++i) std::memcpy(to + (i * width_ + lane) * 8, numbers + i * 4, 8);
  }
  void load(const char* from, int64_t lane, float scale, float* x) const {
    int16_t numbers[kInt8Group];
    for (int64_t i = 0; i < kQuads; ++i) std::memcpy(numbers + i * 4, from + (i * width_ + lane) * 8, 8);
    for (int i = 0; i < kInt8Group; ++i) x[i] = static_cast<float>(numbers[i]) * scale;
  }
#endif

  int64_t groups_, blocks_, width_;
  char* digits_;
  float* scales_;
  int32_t* starts_;
};

#if defined(__AVX512VNNI__)

// sums += weights * digits, four products in each lane. The compiler copies the operands of its own function to and
// fro.
static inline void add_products(__m512i& sums, __m512i weights, __m512i digits) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(digits));
}

// Multiplies 16 quads of a block of Rows rows with two column tiles. x: their digits. Prefetches as much as it reads of
// one tile, at next.
template <int Rows>
static inline __attribute__((always_inline)) void add_digits(const char* x, const char* w0, const char* w1,
                                                             const char* next, __m512i (&a)[Rows], __m512i (&b)[Rows]) {
  for (int64_t quad = 0; quad < kQuads; ++quad, x += Rows * 4) {
    _mm_prefetch(next + quad * 64, _MM_HINT_T0);
    const __m512i left = _mm512_load_si512(w0 + quad * 64), right = _mm512_load_si512(w1 + quad * 64);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * 4, 4);
      const __m512i digits = _mm512_set1_epi32(four);
      add_products(a[r], left, digits);
      add_products(b[r], right, digits);
    }
  }
}

// Multiplies a group of a block of Rows rows with two column tiles, and adds it to sums [Rows][2][16]. Prefetches what
// lies at next0 and next1, as much as it reads.
template <int Rows>
static inline void add_group(const InputGroups& input, int64_t block, int64_t group, const char* w0, const char* w1,
                             const char* next0, const char* next1, float* sums) {
  const char* x = input.digits(block, group);
  const int32_t* starts = input.starts(block, group);
  const float* scales = input.scales(block, group);
  _mm_prefetch(next0, _MM_HINT_T0);
  _mm_prefetch(next1, _MM_HINT_T0);
  __m512i a[Rows], b[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) a[r] = b[r] = _mm512_setzero_si512();
  add_digits<Rows>(x, w0 + 64, w1 + 64, next0 + 64, a, b);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const __m512i start = _mm512_set1_epi32(starts[r]);
    a[r] = _mm512_add_epi32(_mm512_slli_epi32(a[r], 8), start);
    b[r] = _mm512_add_epi32(_mm512_slli_epi32(b[r], 8), start);
  }
  add_digits<Rows>(x + Rows * kInt8Group, w0 + 64, w1 + 64, next1 + 64, a, b);
  const Floats16 scale0 = load(reinterpret_cast<const float*>(w0)), scale1 = load(reinterpret_cast<const float*>(w1));
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r, sums += 32) {
    const Floats16 scale = set1(scales[r]);
    store(sums, fma({_mm512_cvtepi32_ps(a[r])}, mul(scale, scale0), load(sums)));
    store(sums + 16, fma({_mm512_cvtepi32_ps(b[r])}, mul(scale, scale1), load(sums + 16)));
  }
}

#else

// Sixteen sums of pairs, from four registers of four columns each.
static inline Floats16 pair_sums(const __m256i* sums, int32_t start) {
  const __m256i begin = _mm256_set1_epi32(start);
  const __m256i low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[0], sums[1]), 0xd8);
  const __m256i high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2], sums[3]), 0xd8);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(low, begin)), _mm256_cvtepi32_ps(_mm256_add_epi32(high, begin))};
}

// As above.
template <int Rows>
static inline void add_group(const InputGroups& input, int64_t block, int64_t group, const char* w0, const char* w1,
                             const char* next0, const char* next1, float* sums) {
  for (int tile = 0; tile < 2; ++tile) {
    const char *w = tile == 0 ? w0 : w1, *next = tile == 0 ? next0 : next1, *x = input.digits(block, group);
    const Floats16 weight_scale = load(reinterpret_cast<const float*>(w));
    _mm_prefetch(next, _MM_HINT_T0);
    __m256i a[Rows][4];
#pragma GCC unroll 8
    for (int i = 0; i < Rows * 4; ++i) a[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t at = 64; at < kInt8GroupBytes; at += 64, x += Rows * 8) {
      _mm_prefetch(next + at, _MM_HINT_T0);
      __m256i quads[Rows];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        int64_t numbers;
        std::memcpy(&numbers, x + r * 8, 8);
        quads[r] = _mm256_set1_epi64x(numbers);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 4; ++i) {
        const __m256i weights = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + at) + i));
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) a[r][i] = _mm256_add_epi32(a[r][i], _mm256_madd_epi16(weights, quads[r]));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      float* to = sums + r * 32 + tile * 16;
      const Floats16 scale = mul(set1(input.scales(block, group)[r]), weight_scale);
      store(to, fma(pair_sums(a[r], input.starts(block, group)[r]), scale, load(to)));
    }
  }
}

#endif

}  // namespace FD_ISA
}  // namespace fd
