// The products of attention on AMX tiles. The cache holds keys and values in the order of right tiles (kernels.h), so
// nothing is rearranged here, in decode or in prefill.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "attention/blocked.h"
#include "attention/rounded.h"
#include "runtime/amx_tiles.h"
#include "runtime/simd.h"

namespace fd {
namespace amx {
namespace {

constexpr int64_t kGroups = kKeyBlock / 32;  // a right tile has the values of 32 keys

// Row tiles of a task have no padding: 16 rows in tiles 0, 1 and 4, the others in 2, 3 and 5.
class TileProducts : public Rounded {
 public:
  explicit TileProducts(int64_t padded)
      : padded_(padded),
        values_(static_cast<uint16_t*>(scratch(kScratchTiles, static_cast<size_t>(kKeyBlock * padded) * 2))) {}
  TileProducts(const TileProducts&) = delete;
  ~TileProducts() { _tile_release(); }

  void enter(const KeyBlock<uint16_t>& block) {
    for (int64_t g = 0; 2 * g < block.units; ++g) pairs_[g] = values_of(block, g);
  }

  // scores [rows][64] = query [rows][Dp] x keys.
  void score(const uint16_t* query, int64_t rows, const KeyBlock<uint16_t>& block, float* scores) {
    use_rows(rows);
    const bool two = rows > 16;
    Fetcher<uint16_t> fetcher(block, 0, kWithScores, padded_);
    const int64_t lines = fetcher.lines_of((block.units + 1) / 2 * (padded_ / 32));
    for (int64_t u = 0; u < block.units; u += 2) {
      const bool pair = u + 1 < block.units;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t d = 0; d < padded_; d += 32) {
        _tile_loadd(4, query + d, padded_ * 2);
        _tile_loadd(6, block.keys[u] + d * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (pair) {
          _tile_loadd(7, block.keys[u + 1] + d * 16, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (two) {
          _tile_loadd(5, query + 16 * padded_ + d, padded_ * 2);
          _tile_dpbf16ps(2, 5, 6);
          if (pair) _tile_dpbf16ps(3, 5, 7);
        }
        fetcher.next(lines);
      }
      float* to = scores + u * kUnit;
      _tile_stored(0, to, kKeyBlock * 4);
      if (pair) _tile_stored(1, to + kUnit, kKeyBlock * 4);
      if (two) {
        _tile_stored(2, to + 16 * kKeyBlock, kKeyBlock * 4);
        if (pair) _tile_stored(3, to + 16 * kKeyBlock + kUnit, kKeyBlock * 4);
      }
    }
  }

  // out [rows][Dp] = out * shrink + probabilities [rows][64] x values.
  void add_values(const uint16_t* probabilities, const float* shrink, int64_t rows, const KeyBlock<uint16_t>& block,
                  float* out) const {
    shrink_rows(shrink, rows, out);
    const int64_t groups = (block.units + 1) / 2;
    const bool two = rows > 16;
    Fetcher<uint16_t> fetcher(block, kWithValues, 2 * kUnits, padded_);
    const int64_t lines = fetcher.lines_of(groups * (padded_ / 32));
    for (int64_t d = 0; d < padded_; d += 32) {
      float* to = out + d;
      _tile_loadd(0, to, padded_ * 4);
      _tile_loadd(1, to + 16, padded_ * 4);
      if (two) {
        _tile_loadd(2, to + 16 * padded_, padded_ * 4);
        _tile_loadd(3, to + 16 * padded_ + 16, padded_ * 4);
      }
      for (int64_t g = 0; g < groups; ++g) {
        _tile_loadd(4, probabilities + g * 32, kKeyBlock * 2);
        _tile_loadd(6, pairs_[g] + d * 2, padded_ * 4);
        _tile_loadd(7, pairs_[g] + d * 2 + 32, padded_ * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, probabilities + 16 * kKeyBlock + g * 32, kKeyBlock * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        fetcher.next(lines);
      }
      _tile_stored(0, to, padded_ * 4);
      _tile_stored(1, to + 16, padded_ * 4);
      if (two) {
        _tile_stored(2, to + 16 * padded_, padded_ * 4);
        _tile_stored(3, to + 16 * padded_ + 16, padded_ * 4);
      }
    }
  }

 private:
  // Configures the tiles for so many rows.
  void use_rows(int64_t rows) {
    if (rows == rows_) return;
    configure_tiles(std::min<int64_t>(16, rows), std::max<int64_t>(1, rows - 16));
    rows_ = rows;
  }

  // Multiplies each row of out [rows][Dp] with its factor. Most are 1: the best score of a row changes rarely.
  void shrink_rows(const float* shrink, int64_t rows, float* out) const {
    for (int64_t first = 0; first < rows; first += 16) {
      Mask changed = ~equal(load(shrink + first), set1(1.0f)) & ((1u << std::min<int64_t>(16, rows - first)) - 1);
      for (; changed != 0; changed &= changed - 1) {
        const int64_t r = first + __builtin_ctz(changed);
        const Floats16 factor = set1(shrink[r]);
        for (int64_t d = 0; d < padded_; d += 16)
          store(out + r * padded_ + d, mul(load(out + r * padded_ + d), factor));
      }
    }
  }

  // Returns the values of units 2 g and 2 g + 1: in place, or a copy if they lie apart (blocks of 16) or the second one
  // is missing.
  const uint16_t* values_of(const KeyBlock<uint16_t>& block, int64_t g) const {
    const int64_t unit = kUnit * padded_;
    const uint16_t* first = block.values[2 * g];
    const bool both = 2 * g + 1 < block.units;
    if (both && block.values[2 * g + 1] == first + unit) return first;
    uint16_t* copy = values_ + g * 2 * unit;
    copy_unit(first, copy);
    if (both) copy_unit(block.values[2 * g + 1], copy + unit);
    if (!both) std::memset(copy + unit, 0, static_cast<size_t>(unit) * 2);
    return copy;
  }

  void copy_unit(const uint16_t* from, uint16_t* to) const {
    for (int64_t i = 0; i < kUnit * padded_; i += 32) _mm512_store_si512(to + i, _mm512_load_si512(from + i));
  }

  const int64_t padded_;
  uint16_t* values_;                // [2][32][Dp]: copies of values_of
  const uint16_t* pairs_[kGroups];  // the values of a block, 32 keys each
  int64_t rows_ = 0;                // for which the tiles are configured
};

}  // namespace

void attention(const AttentionArgs& a) { run_attention<TileProducts>(a); }

}  // namespace amx
}  // namespace fd
