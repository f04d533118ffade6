// The product of a block of rows with two column tiles of int8 weights: on AMX tiles, AVX512_VNNI or AVX2.
//
//   AMX           TDPBSUD multiplies the digits of all rows, 64 each, with a group of 16 columns
//   AVX512_VNNI   VPDPBUSD multiplies 4 weights with 4 digits and adds them
//   AVX2          VPMADDWD multiplies 2 weights, widened to 16 bits, with 2 numbers q and adds them
//
// All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <algorithm>
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

// Prefetches what is read soon: as many bytes of two column tiles, and adapters.
struct Int8Fetch {
  const char* tile[2];
  int64_t bytes, done;
  int64_t lines;  // of each tile, in a call of go
  LoraFetch loras;

  // Divides the lines by the calls of go.
  inline void spread(int64_t calls) { lines = (bytes / 64 + calls - 1) / calls; }

  inline void go() {
    for (int64_t i = 0; i < lines && done < bytes; ++i, done += 64) {
      _mm_prefetch(tile[0] + done, _MM_HINT_T1);
      _mm_prefetch(tile[1] + done, _MM_HINT_T1);
    }
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

// Where there is one block of rows, memory is the bottleneck, K is not cut, and the kernel fetches on its own.
#if defined(__AMX_INT8__)
// Groups that are fetched ahead then, to L2 and to L1. With 8 rows that reads 1.1 to 1.2 times as fast as one of the
// two alone (Emerald Rapids).
constexpr int64_t kAheadToL2 = 24, kAheadToL1 = 8;
#else
// Groups of two column tiles (2 KiB) that are fetched ahead then: the multiplications of more rows keep the core from
// running ahead on its own.
constexpr int64_t kAhead = 4, kAheadOfFewRows = 2, kFewRows = 4;
#endif

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
    _tile_dpbsud(0, 4, 6);
  }
  inline void load_low() const { _tile_loadd(5, digits + Rows * kInt8Group, 64); }
  inline void multiply_low() const {
    _tile_zero(1);
    _tile_dpbsud(1, 5, 6);
  }
  inline void whole() {
    load_high();
    multiply_high();
    load_low();
    multiply_low();
    advance();
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
// TDPBSUD take 32. Longer runs without a cut take 70. While the tile unit is busy, only one vector unit computes with
// floats and shifts, and a step has 64 such instructions. Prefetches of the input to L1 make it slower.
//
// With one block, each step fetches as much as it reads. Column tiles lie one behind the other, so what lies ahead of a
// tile's end is the start of the next one.
template <int Rows>
static void multiply_cut(const InputGroups& input, const Cut& cut, Int8Fetch& fetch, float* sums,
                         const BlockDone& done) {
  constexpr int kLines = kInt8GroupBytes / 64;
  const bool one_block = cut.blocks == 1;
  alignas(64) int32_t products[2][2][Rows * 16];  // of two steps: high, low
  int now = 0;
  TileSteps<Rows> next(input, cut);
  fetch.spread(next.left);
  next.whole();
  _tile_stored(0, products[0][0], 64);
  _tile_stored(1, products[0][1], 64);
  next.whole();  // there are two at least: a cut has two column tiles
  const int64_t end = cut.first_block + cut.blocks;
  for (int64_t block = cut.first_block; block < end; ++block, sums += kBlockSums) {
    for (int64_t tile = 0; tile < 2; ++tile) {
      float* to = sums + tile * kColumns;
      const char* w = tile == 0 ? cut.w0 : cut.w1;
      __m512 a[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) a[r] = _mm512_load_ps(to + r * 2 * kColumns);
      const float* scales = input.scales(block, cut.first);
      const int32_t* starts = input.starts(block, cut.first);
      for (int64_t g = 0; g < cut.groups; ++g, w += kInt8GroupBytes, scales += Rows, starts += Rows) {
        const __m512 weight_scale = _mm512_load_ps(w);
        const int32_t *high = products[now][0], *low = products[now][1];
        now = 1 - now;
        const bool more = next.left > 0;
        if (one_block) {
          fetch.loras.go();
        } else {
          fetch.go();
        }
        if (more) next.load_high();
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          for (int line = kLines * r / Rows; one_block && line < kLines * (r + 1) / Rows; ++line) {
            _mm_prefetch(w + kAheadToL1 * kInt8GroupBytes + line * 64, _MM_HINT_T0);
            _mm_prefetch(w + kAheadToL2 * kInt8GroupBytes + line * 64, _MM_HINT_T1);
          }
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
          const __m512i both = _mm512_add_epi32(shifted, _mm512_load_si512(low + r * 16));
          const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(both, _mm512_set1_epi32(starts[r])));
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

// sums += weights * digits, four products in each lane. The compiler copies the operands of its own function to and
// fro.
static inline void add_products(__m512i& sums, __m512i weights, __m512i digits) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(digits));
}

// Multiplies 16 quads of a block of Rows rows with two column tiles. x: their digits. Fetches as much as it reads of
// one tile, from `ahead` on, line by line: lines that are fetched all at once wait for one another.
template <int Rows>
static inline __attribute__((always_inline)) void add_digits(const char* x, const char* w0, const char* w1,
                                                             const char* ahead, __m512i (&a)[Rows],
                                                             __m512i (&b)[Rows]) {
  for (int64_t quad = 0; quad < kQuads; ++quad, x += Rows * 4) {
    _mm_prefetch(ahead + quad * 64, _MM_HINT_T0);
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

// Multiplies a group of a block of Rows rows with two column tiles, and adds it to sums [Rows][2][16]. Fetches what
// lies at ahead0 and ahead1, as much as it reads.
template <int Rows>
static inline void add_group(const InputGroups& input, int64_t block, int64_t group, const char* w0, const char* w1,
                             const char* ahead0, const char* ahead1, float* sums) {
  _mm_prefetch(ahead0, _MM_HINT_T0);
  _mm_prefetch(ahead1, _MM_HINT_T0);
  const char* x = input.digits(block, group);
  const float* scales = input.scales(block, group);
  const int32_t* starts = input.starts(block, group);
  __m512i a[Rows], b[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) a[r] = b[r] = _mm512_setzero_si512();
  add_digits<Rows>(x, w0 + 64, w1 + 64, ahead0 + 64, a, b);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const __m512i start = _mm512_set1_epi32(starts[r]);
    a[r] = _mm512_add_epi32(_mm512_slli_epi32(a[r], 8), start);
    b[r] = _mm512_add_epi32(_mm512_slli_epi32(b[r], 8), start);
  }
  add_digits<Rows>(x + Rows * kInt8Group, w0 + 64, w1 + 64, ahead1 + 64, a, b);
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
                             const char* ahead0, const char* ahead1, float* sums) {
  for (int tile = 0; tile < 2; ++tile) {
    const char *w = tile == 0 ? w0 : w1, *ahead = tile == 0 ? ahead0 : ahead1, *x = input.digits(block, group);
    _mm_prefetch(ahead, _MM_HINT_T0);
    const Floats16 weight_scale = load(reinterpret_cast<const float*>(w));
    __m256i a[Rows][4];
#pragma GCC unroll 8
    for (int i = 0; i < Rows * 4; ++i) a[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t at = 64; at < kInt8GroupBytes; at += 64, x += Rows * 8) {
      _mm_prefetch(ahead + at, _MM_HINT_T0);
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

// sums [blocks][kRows][2][16] += products of blocks of Rows rows with the groups of a cut, one group after the other.
template <int Rows>
static void multiply_cut(const InputGroups& input, const Cut& cut, Int8Fetch& fetch, float* sums,
                         const BlockDone& done) {
  fetch.spread(cut.blocks * cut.groups);
  for (int64_t block = cut.first_block; block < cut.first_block + cut.blocks; ++block, sums += kBlockSums) {
    for (int64_t g = 0; g < cut.groups; ++g) {
      const char *w0 = cut.w0 + g * kInt8GroupBytes, *w1 = cut.w1 + g * kInt8GroupBytes;
      if (cut.blocks == 1) {
        fetch.loras.go();
        const int64_t ahead = g + std::min(Rows <= kFewRows ? kAheadOfFewRows : kAhead, cut.groups),
                      left = ahead - cut.groups;
        const int64_t at = (left < 0 ? ahead : left) * kInt8GroupBytes;
        add_group<Rows>(input, block, cut.first + g, w0, w1, (left < 0 ? cut.w0 : fetch.tile[0]) + at,
                        (left < 0 ? cut.w1 : fetch.tile[1]) + at, sums);
      } else {
        fetch.go();
        add_group<Rows>(input, block, cut.first + g, w0, w1, w0, w1, sums);
      }
    }
    done(block, sums);
  }
}

#endif

}  // namespace FD_ISA
}  // namespace fd
