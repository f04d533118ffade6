// The product of a block of rows with two column tiles of int8 weights: on AMX tiles, AVX512_VNNI or AVX2.
//
//   AMX           TDPBSSD multiplies the digits of all rows, 64 each, with a group of 16 columns
//   AVX512_VNNI   VPDPBUSD multiplies 4 digits with 4 weights and adds them
//   AVX2          VPMADDWD multiplies 2 weights, widened to 16 bits, with 2 numbers q and adds them
//
// All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <functional>

#include "linear/int8_groups.h"
#include "linear/lora.h"
#if defined(__AMX_INT8__)
#include "runtime/amx_tiles.h"
#endif

namespace fd {
namespace FD_ISA {

// Prefetches what is read soon: weights of two column tiles, side by side, and adapters.
struct Int8Fetch {
  const char* tile[2];
  int64_t left;   // lines of each tile
  int64_t lines;  // of each tile, in a step
  bool near;      // to L1, not L2
  LoraFetch loras;

  inline void line() {
    if (left == 0) return;
    --left;
    for (const char*& next : tile) {
      near ? _mm_prefetch(next, _MM_HINT_T0) : _mm_prefetch(next, _MM_HINT_T1);
      next += 64;
    }
  }
  inline void go() {
    for (int64_t i = 0; i < lines; ++i) line();
    loras.go();
  }
};

// Blocks [first_block, first_block + blocks) of the input, and groups [first, first + groups) of two column tiles, of
// which the first ones lie at w0 and w1.
struct Cut {
  int64_t first_block, blocks, first, groups;
  const char *w0, *w1;
};

constexpr int64_t kBlockSums = kRows * 2 * kColumns;

// Called with a block and its sums when its products of a cut are added.
using BlockDone = std::function<void(int64_t, float*)>;

#if defined(__AMX_INT8__)

// What a thread needs before products of blocks of `width` rows, and gives back after them.
struct ProductState {
  explicit ProductState(int64_t width) { configure_tiles(width); }
  ~ProductState() { _tile_release(); }
};

// The steps of a cut: over blocks, then the two column tiles, then groups. Each is loaded and multiplied in two parts,
// high digits (sums in tile register 0) and low ones (in 1); then comes advance().
template <int Rows>
struct TileSteps {
  const InputGroups& input;
  const Cut& cut;
  int64_t left;  // steps
  int64_t block, tile = 0, group = 0;
  const char *digits, *weights;

  TileSteps(const InputGroups& input, const Cut& cut)
      : input(input),
        cut(cut),
        left(cut.blocks * 2 * cut.groups),
        block(cut.first_block),
        digits(input.digits(block, cut.first)),
        weights(cut.w0) {}

  inline void load_high() const {
    _tile_loadd(6, weights + 64, 64);
    _tile_loadd(4, digits, 64);
  }
  inline void multiply_high() const {
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
  }
  inline void load_low() const { _tile_loadd(5, digits + Rows * kInt8Group, 64); }
  inline void multiply_low() const {
    _tile_zero(1);
    _tile_dpbssd(1, 5, 6);
  }
  inline void advance() {
    --left;
    digits += 2 * Rows * kInt8Group;
    weights += kInt8GroupBytes;
    if (++group < cut.groups) return;
    group = 0;
    tile = 1 - tile;
    if (tile == 0) ++block;
    digits = input.digits(block, cut.first);
    weights = tile == 0 ? cut.w0 : cut.w1;
  }
};

// sums [blocks][kRows][2][16] += products of blocks of Rows rows with the groups of a cut, one group after the other.
//
// A step multiplies a group of a block with one column tile. While the vector units add the products of a step to its
// sums, which stay in registers, those of the next one go to memory, and the tile unit computes those of the one after.
// So neither waits for the other, nor for a load of what was just stored. Parts of the three alternate: the core looks
// ahead by less than a step.
//
// Measured on Emerald Rapids: a step of 16 rows takes 90 cycles with all data in L1, 105 with the input in L2; its two
// TDPBSSD take 32. Longer runs without a cut take 70. While the tile unit is busy, only one vector unit computes with
// floats and shifts, and a step has 64 such instructions. Prefetches of the input to L1 make it slower.
template <int Rows>
static void multiply_cut(const InputGroups& input, const Cut& cut, Int8Fetch& fetch, float* sums,
                         const BlockDone& done) {
  alignas(64) int32_t products[2][2][Rows * 16];  // of two steps: high, low
  int now = 0;
  TileSteps<Rows> next(input, cut);
  next.load_high();
  next.multiply_high();
  next.load_low();
  next.multiply_low();
  next.advance();
  _tile_stored(0, products[0][0], 64);
  _tile_stored(1, products[0][1], 64);
  next.load_high();
  next.multiply_high();
  next.load_low();
  next.multiply_low();
  next.advance();
  const int64_t end = cut.first_block + cut.blocks;
  for (int64_t block = cut.first_block; block < end; ++block, sums += kBlockSums) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      float* to = sums + tile * kColumns;
      const char* w = tile == 0 ? cut.w0 : cut.w1;
      __m512 a[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) a[r] = _mm512_load_ps(to + r * 2 * kColumns);
      const float* scales = input.scales(block, cut.first);
      for (int64_t g = 0; g < cut.groups; ++g, w += kInt8GroupBytes, scales += Rows) {
        const __m512 weight_scale = _mm512_load_ps(w);
        const int32_t *high = products[now][0], *low = products[now][1];
        now = 1 - now;
        const bool more = next.left > 0;
        fetch.go();
        if (more) next.load_high();
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          if (r == Rows / 8) {
            _tile_stored(0, products[now][0], 64);
            if (more) next.multiply_high();
          }
          if (r == Rows * 3 / 8 && more) next.load_low();
          if (r == Rows * 5 / 8) {
            _tile_stored(1, products[now][1], 64);
            if (more) next.multiply_low();
          }
          const __m512i shifted = _mm512_slli_epi32(_mm512_load_si512(high + r * 16), 8);
          const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(shifted, _mm512_load_si512(low + r * 16)));
          a[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(_mm512_set1_ps(scales[r]), weight_scale), a[r]);
        }
        if (more) next.advance();
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) _mm512_store_ps(to + r * 2 * kColumns, a[r]);
    }
    done(block, sums);
  }
}

#else

struct ProductState {
  explicit ProductState(int64_t) {}
};

#if defined(__AVX512VNNI__)

// sums += digits * weights, four products in each lane. The compiler copies the operands of its own function to and
// fro.
static inline void add_products(__m512i& sums, __m512i digits, __m512i weights) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(digits), "v"(weights));
}

// Multiplies 16 quads of a block of Rows rows with two column tiles. x: their digits. each(w0, w1): called with each
// quad of the weights.
template <int Rows, typename Each>
static inline __attribute__((always_inline)) void add_digits(const char* x, const char* w0, const char* w1,
                                                             __m512i (&a)[Rows], __m512i (&b)[Rows], Each each) {
  for (int64_t quad = 0; quad < kQuads; ++quad, x += Rows * 4) {
    const __m512i left = _mm512_load_si512(w0 + quad * 64), right = _mm512_load_si512(w1 + quad * 64);
    each(left, right);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * 4, 4);
      const __m512i digits = _mm512_set1_epi32(four);
      add_products(a[r], digits, left);
      add_products(b[r], digits, right);
    }
  }
}

// Multiplies a group of a block of Rows rows with two column tiles, and adds it to sums [Rows][2][16]. Fetches as much
// as it reads, line by line: lines that are fetched all at once wait for one another.
template <int Rows>
static inline void add_group(const InputGroups& input, int64_t block, int64_t group, const char* w0, const char* w1,
                             Int8Fetch& fetch, float* sums) {
  fetch.loras.go();
  fetch.line();
  const char* x = input.digits(block, group);
  const float* scales = input.scales(block, group);
  __m512i a[Rows], b[Rows], excess0 = _mm512_setzero_si512(), excess1 = _mm512_setzero_si512();
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) a[r] = b[r] = _mm512_setzero_si512();
  const __m512i all128 = _mm512_set1_epi8(-128);  // without a sign
  add_digits<Rows>(x, w0 + 64, w1 + 64, a, b, [&](__m512i left, __m512i right) {
    fetch.line();
    add_products(excess0, all128, left);
    add_products(excess1, all128, right);
  });
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    a[r] = _mm512_slli_epi32(_mm512_sub_epi32(a[r], excess0), 8);
    b[r] = _mm512_slli_epi32(_mm512_sub_epi32(b[r], excess1), 8);
  }
  add_digits<Rows>(x + Rows * kInt8Group, w0 + 64, w1 + 64, a, b, [](__m512i, __m512i) {});
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
static inline Floats16 pair_sums(const __m256i* sums) {
  const __m256i low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[0], sums[1]), 0xd8);
  const __m256i high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[2], sums[3]), 0xd8);
  return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}

// As above.
template <int Rows>
static inline void add_group(const InputGroups& input, int64_t block, int64_t group, const char* w0, const char* w1,
                             Int8Fetch& fetch, float* sums) {
  fetch.go();
  for (int tile = 0; tile < 2; ++tile) {
    const char *w = tile == 0 ? w0 : w1, *x = input.digits(block, group);
    const Floats16 weight_scale = load(reinterpret_cast<const float*>(w));
    __m256i a[Rows][4];
#pragma GCC unroll 8
    for (int i = 0; i < Rows * 4; ++i) a[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t at = 64; at < kInt8GroupBytes; at += 64, x += Rows * 8) {
      __m256i quads[Rows];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        int64_t numbers;
        std::memcpy(&numbers, x + r * 8, 8);
        quads[r] = _mm256_set1_epi64x(numbers);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 4; ++i) {
        const __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + at) + i));
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) a[r][i] = _mm256_add_epi32(a[r][i], _mm256_madd_epi16(weights, quads[r]));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      float* to = sums + r * 32 + tile * 16;
      const Floats16 scale = mul(set1(input.scales(block, group)[r]), weight_scale);
      store(to, fma(pair_sums(a[r]), scale, load(to)));
    }
  }
}

#endif

// As above.
template <int Rows>
static void multiply_cut(const InputGroups& input, const Cut& cut, Int8Fetch& fetch, float* sums,
                         const BlockDone& done) {
  for (int64_t block = cut.first_block; block < cut.first_block + cut.blocks; ++block, sums += kBlockSums) {
    for (int64_t g = 0; g < cut.groups; ++g) {
      const int64_t at = g * kInt8GroupBytes;
      add_group<Rows>(input, block, cut.first + g, cut.w0 + at, cut.w1 + at, fetch, sums);
    }
    done(block, sums);
  }
}

#endif

}  // namespace FD_ISA
}  // namespace fd
