// bfloat16 linears on AMX tiles.
//
// TDPBF16PS multiplies a left tile (16 rows x 32 k, row-major) with a right tile (16 k pairs x 16 columns, "VNNI"
// order) into 16 x 16 float32 accumulators. Each element adds its 32 products in an order fixed by the instruction, and
// the k tiles follow one another from 0: an output depends on its own row and column alone, whatever M is. Cutting K
// into blocks stores and reloads float32 accumulators, which changes no bit.
//
// Throughput: one TDPBF16PS per 16 cycles, latency 52, so four accumulators keep the unit busy: a 2 x 2 block uses all
// eight tiles (4 accumulators, 2 left, 2 right). Below some 256 rows the weights' way from memory is what takes time: they are
// read once, in order, and prefetched to L2 by the very loop that multiplies.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "memory.h"
#include "simd.h"
#include "thread_pool.h"

namespace fd {
namespace amx {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileFloats = 256;
constexpr int64_t kStrip = 32;  // rows of a 2 x 2 block
constexpr int64_t kPrefetchSteps = 8;

// Rows of x whose bfloat16 copy, cut to a block of K, shares L2 (2 MiB on every AMX core so far) with the weights that
// stream past.
constexpr int64_t kInputBudget = int64_t{1} << 20;
constexpr int64_t kMaxRowBlock = 512;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Accumulators 0..3, left tiles 4 and 5, right tiles 6 and 7. With fewer than 16 rows in all, left tiles and
// accumulators are cut to that: a decode step then loads no padding.
void configure_tiles(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<uint8_t>(t >= 6 ? 16 : rows);
  }
  _tile_loadconfig(&config);
}

// x in left-tile order, [row tile][k tile][rows][32]; rows = min(m, 16), the last row tile padded with zeros.
struct Input {
  const char* data;
  int64_t rows;        // of a tile
  int64_t k_tiles;
  int64_t step;        // bytes from one k tile to the next
  const char* tile(int64_t row_tile, int64_t k_tile) const { return data + (row_tile * k_tiles + k_tile) * step; }
};

void convert_row(const float* x, int64_t k, int64_t k_tiles, char* out, int64_t step) {
  for (int64_t t = 0; t < k_tiles; ++t) {
    const int64_t left = k - t * 32;
    const __mmask16 lo = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __mmask16 hi = left >= 32 ? 0xffff : left > 16 ? static_cast<__mmask16>((1u << (left - 16)) - 1) : 0;
    const __m512 a = _mm512_maskz_loadu_ps(lo, x + t * 32), b = _mm512_maskz_loadu_ps(hi, x + t * 32 + 16);
    _mm512_storeu_si512(out + t * step, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
}

Input convert_input(const float* x, int64_t m, const Weight& w) {
  Input input;
  input.rows = std::min<int64_t>(m, 16);
  input.k_tiles = w.k_padded / kDepth;
  input.step = input.rows * 64;
  const int64_t row_tiles = round_up(m, kStrip) / 16;  // whole strips
  const int64_t used = m <= 16 ? 1 : row_tiles;
  char* data = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(used * input.k_tiles * input.step)));
  input.data = data;
  parallel_for(used, std::max<int64_t>(1, 65536 / (16 * w.k_padded)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      char* tile = data + t * input.k_tiles * input.step;
      for (int64_t r = 0; r < input.rows; ++r) {
        const int64_t row = t * 16 + r;
        if (row < m) {
          convert_row(x + row * w.k, w.k, input.k_tiles, tile + r * 64, input.step);
        } else {
          for (int64_t k = 0; k < input.k_tiles; ++k) std::memset(tile + k * input.step + r * 64, 0, 64);
        }
      }
    }
  });
  return input;
}

// Where the loop prefetches: `lines` cache lines of each of two streams per k tile.
struct Prefetch {
  const char *p0, *p1;
  int lines;
  int64_t jump_at;  // at this k tile continue at next0, next1
  const char *next0, *next1;
};

// accumulators (+)= left[k0, k0 + steps) x right[k0, k0 + steps), for RowTiles x 2 tiles.
template <int RowTiles>
inline void multiply(const char* a0, const char* a1, int64_t a_step, const char* b0, const char* b1, int64_t steps,
                     Prefetch pf) {
  for (int64_t i = 0; i < steps; ++i) {
    if (i == pf.jump_at) {
      pf.p0 = pf.next0;
      pf.p1 = pf.next1;
    }
    for (int l = 0; l < pf.lines; ++l) {
      _mm_prefetch(pf.p0, _MM_HINT_T1);
      _mm_prefetch(pf.p1, _MM_HINT_T1);
      pf.p0 += 64;
      pf.p1 += 64;
    }
    _tile_loadd(6, b0, 64);
    _tile_loadd(4, a0, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (RowTiles == 2) {
      _tile_loadd(5, a1, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_loadd(7, b1, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (RowTiles == 2) _tile_dpbf16ps(3, 5, 7);
    a0 += a_step;
    a1 += a_step;
    b0 += kTileBytes;
    b1 += kTileBytes;
  }
}

template <int RowTiles>
inline void load_accumulators(const float* c) {
  _tile_loadd(0, c, 64);
  _tile_loadd(1, c + kTileFloats, 64);
  if (RowTiles == 2) {
    _tile_loadd(2, c + 2 * kTileFloats, 64);
    _tile_loadd(3, c + 3 * kTileFloats, 64);
  }
}

template <int RowTiles>
inline void zero_accumulators() {
  _tile_zero(0);
  _tile_zero(1);
  if (RowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int RowTiles>
inline void store_accumulators(float* c) {
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kTileFloats, 64);
  if (RowTiles == 2) {
    _tile_stored(2, c + 2 * kTileFloats, 64);
    _tile_stored(3, c + 3 * kTileFloats, 64);
  }
}

// Calls finish(row, pair, first 16 columns, second 16 columns) for each row and each pair of column tiles
// (tiles(pair).first, .second).
template <typename Tiles, typename Finish>
void for_all_pairs(const float* x, int64_t m, const Weight& w, int64_t pairs, Tiles tiles, Finish finish) {
  const Input input = convert_input(x, m, w);
  const char* weight = static_cast<const char*>(w.data);
  const int64_t column_bytes = w.tile_elements() * 2;
  const int64_t k_tiles = input.k_tiles;

  const int64_t row_block = std::min(round_up(m, kStrip), w.k_padded * 2 * kMaxRowBlock <= kInputBudget ? kMaxRowBlock : kMaxRowBlock / 2);
  const int64_t k_blocks = m <= 64 ? 1 : (row_block * w.k_padded * 2 + kInputBudget - 1) / kInputBudget;
  const int64_t k_block = (k_tiles + k_blocks - 1) / k_blocks;
  const int64_t strips_per_block = row_block / kStrip;
  float* partial = nullptr;
  if (k_blocks > 1)
    partial = static_cast<float*>(scratch(kScratchAccumulator, static_cast<size_t>(pairs * row_block * 32) * 4));

  for (int64_t row0 = 0; row0 < m; row0 += row_block) {
    const int64_t rows_here = std::min(row_block, m - row0);
    const int64_t strips = (rows_here + kStrip - 1) / kStrip;
    for (int64_t k0 = 0; k0 < k_tiles; k0 += k_block) {
      const int64_t steps = std::min(k_block, k_tiles - k0);
      const bool first = k0 == 0, last = k0 + steps == k_tiles;
      auto run = [&](int64_t begin, int64_t end) {
        configure_tiles(static_cast<int>(input.rows));
        alignas(64) float block[4 * kTileFloats];
        for (int64_t pair = begin; pair < end; ++pair) {
          int64_t t0, t1;
          tiles(pair, &t0, &t1);
          const char *b0 = weight + t0 * column_bytes + k0 * kTileBytes, *b1 = weight + t1 * column_bytes + k0 * kTileBytes;
          tiles(std::min(pair + 1, pairs - 1), &t0, &t1);
          const char *next0 = weight + t0 * column_bytes + k0 * kTileBytes, *next1 = weight + t1 * column_bytes + k0 * kTileBytes;
          for (int64_t s = 0; s < strips; ++s) {
            const int64_t row = row0 + s * kStrip;
            const int64_t row_tile = row / 16;
            const bool two = m - row > 16;
            Prefetch pf;
            if (strips == 1) {
              const int64_t ahead = std::min(kPrefetchSteps, steps);
              pf = {b0 + ahead * kTileBytes, b1 + ahead * kTileBytes, 16, steps - ahead, next0, next1};
            } else {
              // Each strip fetches its part of the next pair, so that memory is read while every strip computes.
              const int lines = static_cast<int>((16 + strips - 1) / strips);
              const int64_t offset = s * lines * 64 * steps;
              const bool wanted = offset < steps * kTileBytes;
              pf = {next0 + offset, next1 + offset, wanted ? lines : 0, -1, nullptr, nullptr};
            }
            const char *a0 = input.tile(row_tile, k0), *a1 = input.tile(row_tile + 1, k0);
            float* c = k_blocks > 1 ? partial + (pair * strips_per_block + s) * 4 * kTileFloats : block;
            if (two) {
              first ? zero_accumulators<2>() : load_accumulators<2>(c);
              multiply<2>(a0, a1, input.step, b0, b1, steps, pf);
              store_accumulators<2>(c);
            } else {
              first ? zero_accumulators<1>() : load_accumulators<1>(c);
              multiply<1>(a0, a0, input.step, b0, b1, steps, pf);
              store_accumulators<1>(c);
            }
            if (!last) continue;
            const int64_t count = std::min(kStrip, m - row);
            for (int64_t r = 0; r < count; ++r) {
              const float* from = c + (r / 16) * 2 * kTileFloats + (r % 16) * 16;
              finish(row + r, pair, load(from), load(from + kTileFloats));
            }
          }
        }
        _tile_release();
      };
      parallel_for(pairs, 1, run);
    }
  }
}

void store_columns(float* row, int64_t tile, int64_t n, F16 value) {
  const int64_t column = tile * kColumns;
  if (column + kColumns <= n) {
    store(row + column, value);
  } else if (column < n) {
    store_n(row + column, value, static_cast<int>(n - column));
  }
}

F16 with_bias(const Weight& w, int64_t tile, F16 value) {
  return w.bias == nullptr ? value : add(value, load(w.bias + tile * kColumns));
}

}  // namespace

void linear(const float* x, int64_t m, const Weight& w, float* out) {
  const int64_t count = w.tiles();
  for_all_pairs(
      x, m, w, (count + 1) / 2,
      [=](int64_t pair, int64_t* t0, int64_t* t1) {
        *t0 = 2 * pair;
        *t1 = std::min(2 * pair + 1, count - 1);
      },
      [&](int64_t row, int64_t pair, F16 c0, F16 c1) {
        float* to = out + row * w.n;
        store_columns(to, 2 * pair, w.n, with_bias(w, 2 * pair, c0));
        if (2 * pair + 1 < count) store_columns(to, 2 * pair + 1, w.n, with_bias(w, 2 * pair + 1, c1));
      });
}

void gated_linear(const float* x, int64_t m, const Weight& w, float* out) {
  const int64_t half = w.n / 2, half_tiles = half / kColumns;
  if (half % kColumns != 0) {  // gate and up do not start on tile boundaries
    float* both = static_cast<float*>(scratch(kScratchQuery, static_cast<size_t>(m * w.n) * 4));
    linear(x, m, w, both);
    avx512::silu_mul(both, out, m, half);
    return;
  }
  for_all_pairs(
      x, m, w, half_tiles,
      [=](int64_t pair, int64_t* t0, int64_t* t1) {
        *t0 = pair;
        *t1 = pair + half_tiles;
      },
      [&](int64_t row, int64_t pair, F16 gate, F16 up) {
        gate = with_bias(w, pair, gate);
        up = with_bias(w, pair + half_tiles, up);
        store(out + row * half + pair * kColumns, mul(silu(gate), up));
      });
}

}  // namespace amx
}  // namespace fd
