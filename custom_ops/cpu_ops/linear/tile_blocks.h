// Products of blocks of AMX tiles, with the sums in tile registers 0 to 3, the input in 4 and 5, weights in 6 and 7.
// All functions are static: runtime/simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "linear/input_tiles.h"

namespace fd {
namespace amx {

// Sums of a pair of column tiles lie in memory as [rows][32 columns].
constexpr int kSumStride = 2 * kColumns * 4;
constexpr int64_t kTileSums = 16 * 2 * kColumns;  // of 16 rows

// Adds the products of a k tile to the sums. Keep: ordinary loads of the weights, which bring them to L1.
template <int RowTiles, bool Keep>
static inline void multiply_tiles(const char* a0, const char* a1, const char* b0, const char* b1) {
  if (Keep) {
    _tile_loadd(6, b0, 64);
  } else {
    _tile_stream_loadd(6, b0, 64);
  }
  _tile_stream_loadd(4, a0, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (RowTiles == 2) {
    _tile_stream_loadd(5, a1, 64);
    _tile_dpbf16ps(2, 5, 6);
  }
  if (Keep) {
    _tile_loadd(7, b1, 64);
  } else {
    _tile_stream_loadd(7, b1, 64);
  }
  _tile_dpbf16ps(1, 4, 7);
  if (RowTiles == 2) _tile_dpbf16ps(3, 5, 7);
}

// to [16 RowTiles][32] = input x weights over `steps` k tiles, for RowTiles x 2 tiles. The sums begin as zeros (from:
// null), or as what an earlier pass over K left in `from`. a0 and a1 are row tiles of the input, `a_step` bytes from
// one k tile to the next. `beside` runs before each `Steps` k tiles: while the tile unit is busy, the rest of the core
// fetches weights and finishes earlier results.
//
// The first `kept` k tiles of the weights stay in L1 for the rows that follow. All else is loaded with a hint that
// leaves L1 as it is.
template <int RowTiles, int Steps, typename Beside>
static inline void multiply_block(const char* a0, const char* a1, int64_t a_step, const char* b0, const char* b1,
                                  int64_t steps, int64_t kept, const float* from, float* to, Beside&& beside) {
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if (RowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, from, kSumStride);
    _tile_loadd(1, from + kColumns, kSumStride);
    if (RowTiles == 2) {
      _tile_loadd(2, from + kTileSums, kSumStride);
      _tile_loadd(3, from + kTileSums + kColumns, kSumStride);
    }
  }
  for (int64_t k = 0; k < steps; k += Steps) {
    beside();
    const auto go = [&](auto keep, int64_t count) {
      for (int64_t i = 0; i < count; ++i)
        multiply_tiles<RowTiles, keep.value>(a0 + i * a_step, a1 + i * a_step, b0 + i * kTileBytes,
                                             b1 + i * kTileBytes);
    };
    if (k + Steps > steps) {
      go(std::false_type(), steps - k);
    } else if (k < kept) {
      go(std::true_type(), Steps);
    } else {
      go(std::false_type(), Steps);
    }
    a0 += Steps * a_step;
    a1 += Steps * a_step;
    b0 += Steps * kTileBytes;
    b1 += Steps * kTileBytes;
  }
  _tile_stored(0, to, kSumStride);
  _tile_stored(1, to + kColumns, kSumStride);
  if (RowTiles == 2) {
    _tile_stored(2, to + kTileSums, kSumStride);
    _tile_stored(3, to + kTileSums + kColumns, kSumStride);
  }
}

}  // namespace amx
}  // namespace fd
