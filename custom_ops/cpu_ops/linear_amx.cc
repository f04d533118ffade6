// bfloat16 linears on AMX tiles.
//
// TDPBF16PS multiplies a left tile (16 rows x 32 k, row-major) with a right tile (16 k pairs x 16 columns, "VNNI"
// order) into 16 x 16 float32 accumulators. Each element adds its 32 products in an order fixed by the instruction, and
// the k tiles follow one another from 0: an output depends on its own row and column alone, whatever M is. Cutting K
// into blocks stores and reloads float32 accumulators, which changes no bit.
//
// Throughput: one TDPBF16PS per 16 cycles, latency 52, so four accumulators keep the unit busy: a 2 x 2 block uses all
// eight tiles (4 accumulators, 2 left, 2 right). Below some 256 rows the way of the weights from memory is what takes
// time: they are read once, in order, and prefetched to L2 by the very loop that multiplies.
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
// How far ahead weights are fetched when memory is the bound: 4 KiB, about what one core's memory latency is worth.
constexpr int64_t kPrefetchSteps = 2;

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
  int64_t rows;  // of a tile
  int64_t k_tiles;
  int64_t step;  // bytes from one k tile to the next
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
  const int64_t row_tiles = m <= 16 ? 1 : round_up(m, kStrip) / 16;  // whole strips
  char* data = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(row_tiles * input.k_tiles * input.step)));
  input.data = data;
  parallel_for(row_tiles, std::max<int64_t>(1, 65536 / (16 * w.k_padded)), [&](int64_t begin, int64_t end) {
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

// accumulators (+)= left x right over `steps` k tiles, for RowTiles x 2 tiles. `beside` runs once per k tile: while the
// tile unit is busy, the rest of the core fetches weights and finishes earlier results.
template <int RowTiles, typename Beside>
inline void multiply(const char* a0, const char* a1, int64_t a_step, const char* b0, const char* b1, int64_t steps,
                     Beside&& beside) {
  for (int64_t i = 0; i < steps; ++i) {
    beside(i);
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

// The four accumulators start as zeros, or as what an earlier block of K left in c; at the end they go to `to`.
template <int RowTiles, typename Beside>
inline void multiply_block(const Input& input, int64_t row_tile, int64_t k0, int64_t steps, const char* b0,
                           const char* b1, const float* c, float* to, Beside&& beside) {
  if (c == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if (RowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + kTileFloats, 64);
    if (RowTiles == 2) {
      _tile_loadd(2, c + 2 * kTileFloats, 64);
      _tile_loadd(3, c + 3 * kTileFloats, 64);
    }
  }
  const char* a0 = input.tile(row_tile, k0);
  const char* a1 = RowTiles == 2 ? input.tile(row_tile + 1, k0) : a0;
  multiply<RowTiles>(a0, a1, input.step, b0, b1, steps, beside);
  _tile_stored(0, to, 64);
  _tile_stored(1, to + kTileFloats, 64);
  if (RowTiles == 2) {
    _tile_stored(2, to + 2 * kTileFloats, 64);
    _tile_stored(3, to + 3 * kTileFloats, 64);
  }
}

// Accumulators that are complete but not yet written out.
struct Pending {
  const float* c = nullptr;
  int64_t pair = 0, row = 0, done = 0, count = 0;

  template <typename Finish>
  inline void finish_rows(int64_t rows, Finish& finish) {
    for (const int64_t end = std::min(count, done + rows); done < end; ++done) {
      const float* from = c + (done / 16) * 2 * kTileFloats + (done % 16) * 16;
      finish(row + done, pair, load(from), load(from + kTileFloats));
    }
  }
};

// One pass of a block of rows over one block of K.
struct Pass {
  int64_t row0, rows, k0, steps;
  bool first, last;
  float* partial;  // accumulators between blocks of K, [pair][strip][4 tiles]; null: K is not cut
};

// Calls finish(row, pair, first 16 columns, second 16 columns) for each row of the pass and each pair in [begin, end).
template <typename Tiles, typename Finish>
void run_pairs(const Input& input, const Weight& w, const Pass& pass, int64_t pairs, int64_t begin, int64_t end,
               const Tiles& tiles, Finish& finish) {
  const char* weight = static_cast<const char*>(w.data) + pass.k0 * kTileBytes;
  const int64_t column_bytes = w.tile_elements() * 2;
  const int64_t strips = (pass.rows + kStrip - 1) / kStrip, steps = pass.steps;
  const int64_t rows_per_step = (kStrip + steps - 1) / steps;
  alignas(64) float blocks[2][4 * kTileFloats];
  int current = 0;
  Pending pending;
  configure_tiles(static_cast<int>(input.rows));
  for (int64_t pair = begin; pair < end; ++pair) {
    int64_t t0, t1;
    tiles(pair, &t0, &t1);
    const char *b0 = weight + t0 * column_bytes, *b1 = weight + t1 * column_bytes;
    tiles(std::min(pair + 1, pairs - 1), &t0, &t1);
    const char *next0 = weight + t0 * column_bytes, *next1 = weight + t1 * column_bytes;
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t row = s * kStrip, count = std::min(kStrip, pass.rows - row);
      float* kept = pass.partial == nullptr ? nullptr : pass.partial + (pair * strips + s) * 4 * kTileFloats;
      float* to = kept != nullptr && !pass.last ? kept : blocks[current ^= 1];
      const float* from = pass.first ? nullptr : kept;
      auto run = [&](auto&& beside) {
        if (count > 16) {
          multiply_block<2>(input, row / 16, pass.k0, steps, b0, b1, from, to, beside);
        } else {
          multiply_block<1>(input, row / 16, pass.k0, steps, b0, b1, from, to, beside);
        }
      };
      if (strips == 1) {
        // Memory is the bound: fetch a fixed distance ahead, across the end of the pair.
        const int64_t ahead = std::min(kPrefetchSteps, steps);
        const char *p0 = b0 + ahead * kTileBytes, *p1 = b1 + ahead * kTileBytes;
        run([&](int64_t i) {
          if (i == steps - ahead) p0 = next0, p1 = next1;
          for (int l = 0; l < 16; ++l, p0 += 64, p1 += 64) {
            _mm_prefetch(p0, _MM_HINT_T1);
            _mm_prefetch(p1, _MM_HINT_T1);
          }
          pending.finish_rows(rows_per_step, finish);
        });
      } else {
        // Each strip fetches its part of the next pair, so that memory is read while every strip computes.
        const int64_t lines = (32 + strips - 1) / strips;
        int64_t line = s * steps * lines;
        const int64_t half = steps * 16;
        run([&](int64_t) {
          for (int64_t l = 0; l < lines; ++l, ++line) {
            if (line >= 2 * half) break;
            _mm_prefetch(line < half ? next0 + line * 64 : next1 + (line - half) * 64, _MM_HINT_T1);
          }
          pending.finish_rows(rows_per_step, finish);
        });
      }
      if (pass.last) pending = {to, pair, pass.row0 + row, 0, count};
    }
  }
  pending.finish_rows(kStrip, finish);
  _mm_sfence();  // writes past the cache become visible before the range counts as done
  _tile_release();
}

// The same for all m rows, on all threads.
template <typename Tiles, typename Finish>
void for_all_pairs(const float* x, int64_t m, const Weight& w, int64_t pairs, Tiles tiles, Finish finish) {
  const int64_t k_tiles = w.k_padded / kDepth;
  const int64_t row_bytes = w.k_padded * 2;
  const int64_t row_block = row_bytes * kMaxRowBlock <= kInputBudget ? kMaxRowBlock : kMaxRowBlock / 2;
  for (int64_t row0 = 0; row0 < m; row0 += row_block) {
    Pass pass = {};
    pass.row0 = row0;
    pass.rows = std::min(row_block, m - row0);
    const Input input = convert_input(x + row0 * w.k, pass.rows, w);
    const int64_t k_blocks = pass.rows <= 64 ? 1 : (pass.rows * row_bytes + kInputBudget - 1) / kInputBudget;
    const int64_t k_block = (k_tiles + k_blocks - 1) / k_blocks;
    if (k_blocks > 1)
      pass.partial = static_cast<float*>(
          scratch(kScratchAccumulator, static_cast<size_t>(pairs * round_up(pass.rows, kStrip) * 32) * 4));
    for (pass.k0 = 0; pass.k0 < k_tiles; pass.k0 += k_block) {
      pass.steps = std::min(k_block, k_tiles - pass.k0);
      pass.first = pass.k0 == 0;
      pass.last = pass.k0 + pass.steps == k_tiles;
      parallel_for(pairs, 1, [&](int64_t begin, int64_t end) {
        run_pairs(input, w, pass, pairs, begin, end, tiles, finish);
      });
    }
  }
}

// Results too large to still be in a cache when the next op reads them are written past it: an ordinary store would
// first read the line it overwrites. Needs rows of whole, aligned cache lines.
bool write_past_cache(const float* out, int64_t m, int64_t n) {
  constexpr int64_t kLarge = int64_t{4} << 20;
  return m * n * 4 > kLarge && n % kColumns == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

void store_columns(float* row, int64_t tile, int64_t n, F16 value, bool past_cache) {
  const int64_t column = tile * kColumns;
  if (past_cache) {
    _mm512_stream_ps(row + column, value.v);
  } else if (column + kColumns <= n) {
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
  const bool past_cache = write_past_cache(out, m, w.n);
  for_all_pairs(
      x, m, w, (count + 1) / 2,
      [=](int64_t pair, int64_t* t0, int64_t* t1) {
        *t0 = 2 * pair;
        *t1 = std::min(2 * pair + 1, count - 1);
      },
      [&](int64_t row, int64_t pair, F16 c0, F16 c1) {
        float* to = out + row * w.n;
        store_columns(to, 2 * pair, w.n, with_bias(w, 2 * pair, c0), past_cache);
        if (2 * pair + 1 < count) 
          store_columns(to, 2 * pair + 1, w.n, with_bias(w, 2 * pair + 1, c1), past_cache);
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
  const bool past_cache = write_past_cache(out, m, half);
  for_all_pairs(
      x, m, w, half_tiles,
      [=](int64_t pair, int64_t* t0, int64_t* t1) {
        *t0 = pair;
        *t1 = pair + half_tiles;
      },
      [&](int64_t row, int64_t pair, F16 gate, F16 up) {
        gate = with_bias(w, pair, gate);
        up = with_bias(w, pair + half_tiles, up);
        store_columns(out + row * half, pair, half, mul(silu(gate), up), past_cache);
      });
}

}  // namespace amx
}  // namespace fd
