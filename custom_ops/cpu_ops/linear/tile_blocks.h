// Products of blocks of AMX tiles, with the sums in tile registers 0 to 3, the input in 4 and 5, weights in 6 and 7.
// All functions are static: runtime/simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear/input_tiles.h"

namespace fd {
namespace amx {

// Sums lie in memory pair by pair of column tiles, as [rows][32 columns].
constexpr int kSumStride = 2 * kColumns * 4;
constexpr int64_t kTileSums = 16 * 2 * kColumns;  // of 16 rows

// Few rows: sums [16 RowTiles][32] = input x weights over all k tiles, for RowTiles x 2 tiles. `beside` runs once per k
// tile: while the tile unit is busy, the rest of the core fetches weights and finishes earlier results.
template <int RowTiles, typename Beside>
static inline void multiply_few(const InputTiles& input, int64_t row_tile, const char* b0, const char* b1, float* sums,
                                Beside beside) {
  _tile_zero(0);
  _tile_zero(1);
  if (RowTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* a0 = input.tile(row_tile, 0);
  const char* a1 = RowTiles == 2 ? input.tile(row_tile + 1, 0) : a0;
  for (int64_t k = 0; k < input.k_tiles; ++k) {
    beside();
    _tile_loadd(6, b0, 64);
    _tile_loadd(7, b1, 64);
    _tile_loadd(4, a0, 64);
    if (RowTiles == 2) _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (RowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a0 += input.step();
    a1 += input.step();
    b0 += kTileBytes;
    b1 += kTileBytes;
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kColumns, kSumStride);
  if (RowTiles == 2) {
    _tile_stored(2, sums + kTileSums, kSumStride);
    _tile_stored(3, sums + kTileSums + kColumns, kSumStride);
  }
}

// The weights of four column tiles: of two pairs.
struct Columns {
  const char* tile[4];
};

// Many rows: multiplies a row tile `a` with four column tiles, from byte `at` of each on, over `steps` k tiles. The
// sums [2 pairs][16][32] begin as zeros (from: null), or as what an earlier cut left in `from`, and end in `to`. Tiles
// of the input go to two registers in turn, those of weights too: no load waits until the last product has read its
// register. `beside` runs once per k tile.
template <typename Beside>
static inline void multiply_block(const char* a, const Columns& b, int64_t at, int64_t steps, const float* from,
                                  float* to, Beside beside) {
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, from, kSumStride);
    _tile_loadd(1, from + kColumns, kSumStride);
    _tile_loadd(2, from + kTileSums, kSumStride);
    _tile_loadd(3, from + kTileSums + kColumns, kSumStride);
  }
  const char *b0 = b.tile[0] + at, *b1 = b.tile[1] + at, *b2 = b.tile[2] + at, *b3 = b.tile[3] + at;
  for (int64_t i = 0; i < steps; i += 2) {
    const int64_t here = i * kTileBytes, next = here + kTileBytes;
    beside();
    _tile_loadd(4, a + here, 64);
    _tile_loadd(6, b0 + here, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + here, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b2 + here, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b3 + here, 64);
    _tile_dpbf16ps(3, 4, 7);
    if (i + 1 == steps) break;
    beside();
    _tile_loadd(5, a + next, 64);
    _tile_loadd(6, b0 + next, 64);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, b1 + next, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, b2 + next, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, b3 + next, 64);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, to, kSumStride);
  _tile_stored(1, to + kColumns, kSumStride);
  _tile_stored(2, to + kTileSums, kSumStride);
  _tile_stored(3, to + kTileSums + kColumns, kSumStride);
}

}  // namespace amx
}  // namespace fd
