// What the kernels with bfloat16 input share (linear_bf16.cc, linear_amx.cc): the layout of the input, and where
// results go. All functions are static: runtime/simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "linear/linear.h"
#include "runtime/approximate_math.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kTileBytes = 1024;  // a k tile of a column tile of a weight

// The data of a LinearInput: bfloat16 [row tile][k tile][rows of a tile][32]. Rows from m on hold anything: a row of
// the result depends on its own input row only.
struct InputTiles {
  char* data;
  int64_t rows;     // of a tile
  int64_t k_tiles;  // of a row

  // Takes memory for m rows, rounded up to a multiple of `unit`.
  InputTiles(ScratchSlot slot, int64_t m, int64_t unit, int64_t rows, const Weight& w)
      : InputTiles(scratch(slot, static_cast<size_t>(round_up(m, unit) * w.k_padded * 2)), rows, w) {}
  InputTiles(const void* data, int64_t rows, const Weight& w)
      : data(static_cast<char*>(const_cast<void*>(data))), rows(rows), k_tiles(w.k_padded / kDepth) {}

  int64_t step() const { return rows * 64; }  // bytes from one k tile to the next
  char* tile(int64_t row_tile, int64_t k_tile) const { return data + (row_tile * k_tiles + k_tile) * step(); }
  char* row(int64_t r) const {
    if (rows == 16) return tile(r / 16, 0) + r % 16 * 64;                                   // faster than a division
    const uint32_t index = static_cast<uint32_t>(r), height = static_cast<uint32_t>(rows);  // 64 bits divide slowly
    return tile(index / height, 0) + index % height * 64;
  }
};

static inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count > 0 ? static_cast<__mmask16>((1u << count) - 1) : 0;
}

// Converts a row of float32 (times factor times norm) to a row of the input layout.
static inline void convert_row(const float* x, const float* norm, float factor, int64_t k, int64_t k_tiles, char* out,
                               int64_t step) {
  const __m512 scale = _mm512_set1_ps(factor);
  for (int64_t t = 0; t < k_tiles; ++t) {
    const int64_t at = t * 32;
    const __mmask16 lo = first_lanes(k - at), hi = first_lanes(k - at - 16);
    __m512 a = _mm512_maskz_loadu_ps(lo, x + at), b = _mm512_maskz_loadu_ps(hi, x + at + 16);
    if (norm != nullptr) {
      a = _mm512_mul_ps(_mm512_mul_ps(a, scale), _mm512_maskz_loadu_ps(lo, norm + at));
      b = _mm512_mul_ps(_mm512_mul_ps(b, scale), _mm512_maskz_loadu_ps(hi, norm + at + 16));
    }
    _mm512_storeu_si512(out + t * step, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
}

// Fills the tiles with x [m, k], or with RMSNorm(x) where `norm` [k] is not null.
static inline void convert_rows(const InputTiles& input, const float* x, const float* norm, float eps, int64_t m,
                                const Weight& w) {
  parallel_for(m, std::max<int64_t>(1, 16384 / w.k_padded), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = x + r * w.k;
      const float factor = norm == nullptr ? 1.0f : norm_factor(row, w.k, eps);
      convert_row(row, norm, factor, w.k, input.k_tiles, input.row(r), input.step());
    }
  });
}

// Large results, which leave the cache before they are read, are written with streaming stores: an ordinary store would
// first read the line that it overwrites. Needs rows of whole, aligned cache lines.
static inline bool write_past_cache(const float* out, int64_t m, int64_t n) {
  constexpr int64_t kLarge = int64_t{4} << 20;
  return m * n * 4 > kLarge && n % kColumns == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

static inline void stream_columns(float* row, int64_t tile, int64_t, Floats16 value) {
  _mm512_stream_ps(row + tile * kColumns, value.v);
}

// Stores all products of m rows to `out`, or adds them. products(pairs, finish, expect) calls finish(row, count, pair,
// values) for rows [row, row + count) and a pair of column tiles; values: float32 [count][2][16]. It may call
// expect(row, pair, fetch) some time before, which calls fetch with each address of a line that finish will write.
template <typename Products>
static inline void store_products(int64_t m, const Weight& w, float* out, bool accumulate, const Products& products) {
  const Neighbours pairs = {w.tiles()};
  const auto with = [&](auto put) {
    const auto finish = [&](int64_t row, int64_t count, int64_t pair, const float* values) {
      float* to = out + row * w.n;
      for (int64_t r = 0; r < count; ++r, to += w.n, values += 2 * kColumns) {
        put(to, 2 * pair, w.n, load(values));
        if (2 * pair + 1 < pairs.tiles) put(to, 2 * pair + 1, w.n, load(values + kColumns));
      }
    };
    const auto expect = [&](int64_t row, int64_t pair, auto fetch) {
      const float* to = out + row * w.n + 2 * pair * kColumns;
      fetch(to);
      fetch(to + kColumns);
    };
    products(pairs, finish, expect);
  };
  if (accumulate) {
    with([](float* row, int64_t tile, int64_t n, Floats16 v) { add_columns(row, tile, n, v); });
  } else if (write_past_cache(out, m, w.n)) {
    with([](float* row, int64_t tile, int64_t n, Floats16 v) { stream_columns(row, tile, n, v); });
  } else {
    with([](float* row, int64_t tile, int64_t n, Floats16 v) { store_columns(row, tile, n, v); });
  }
}

static inline __m512 approximate_gated(Activation activation, __m512 gate, __m512 up) {
  if (activation == kSwigluClamped) return approximate_swiglu_clamped(gate, up);
  return _mm512_mul_ps(activation == kGeluTanh ? approximate_gelu_tanh(gate) : approximate_silu(gate), up);
}

// Fills `inner` with the activation of gate and up, where products (see above) computes both halves of `w`.
template <typename Products>
static inline void gate_products(int64_t m, const Weight& w, const InputTiles& inner, Activation activation,
                                 const Products& products) {
  const int64_t half_tiles = w.n / 2 / kColumns;
  const auto put = [&](int64_t row, int64_t tile, __m256i values) {
    char* to = inner.row(row) + tile / 2 * inner.step() + tile % 2 * 32;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
  };
  if (half_tiles % 2 != 0)  // the upper half of the last k tile is padding
    for (int64_t r = 0; r < m; ++r) put(r, half_tiles, _mm256_setzero_si256());
  const auto finish = [&](int64_t row, int64_t count, int64_t pair, const float* values) {
    for (int64_t r = 0; r < count; ++r, values += 2 * kColumns) {
      const __m512 gate = load(values).v, up = load(values + kColumns).v;
      put(row + r, pair, (__m256i)_mm512_cvtneps_pbh(approximate_gated(activation, gate, up)));
    }
  };
  products(Halves{half_tiles}, finish, [](int64_t, int64_t, auto) {});
}

}  // namespace FD_ISA
}  // namespace fd
