// The products of attention on AMX tiles. The cache holds keys and values in the order of right tiles (kernels.h), so
// nothing is rearranged here, in decode or in prefill.
#include <immintrin.h>

#include <cstring>

#include "attention/blocked.h"
#include "attention/rounded.h"
#include "runtime/amx_tiles.h"
#include "runtime/simd.h"

namespace fd {
namespace amx {
namespace {

constexpr int64_t kGroups = kKeyBlock / 32;  // a right tile has the values of 32 keys

// Rows of an input tile are always 16. If a task has fewer, the other rows hold whatever lies behind its queries. A row
// of the result depends on its own row of the input only.
class TileProducts : public Rounded {
 public:
  static constexpr bool kFetchesBesideSoftmax = false;

  explicit TileProducts(int64_t padded) : padded_(padded) {
    float* memory = static_cast<float*>(scratch(kScratchTiles, static_cast<size_t>(2 * kQueryRows * padded) * 4));
    product_ = memory;
    values_ = reinterpret_cast<uint16_t*>(memory + kQueryRows * padded);
    configure_tiles(16);  // last: an exception must not leave the tiles in use
  }
  TileProducts(const TileProducts&) = delete;
  ~TileProducts() { _tile_release(); }

  // scores [rows][64] = query [rows][Dp] x keys.
  void score(const uint16_t* query, int64_t rows, const KeyBlock<uint16_t>& block, float* scores) const {
    for (const uint16_t* piece : block.ahead)
      for (int64_t i = 0; i < kUnit * padded_; i += 32) _mm_prefetch(piece + i, _MM_HINT_T1);
    const bool two = rows > 16;
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
    const int64_t groups = (block.units + 1) / 2;
    const uint16_t* values[kGroups];
    for (int64_t g = 0; g < groups; ++g) values[g] = values_of(block, g);
    const bool two = rows > 16;
    for (int64_t d = 0; d < padded_; d += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t g = 0; g < groups; ++g) {
        _tile_loadd(4, probabilities + g * 32, kKeyBlock * 2);
        _tile_loadd(6, values[g] + d * 2, padded_ * 4);
        _tile_loadd(7, values[g] + d * 2 + 32, padded_ * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, probabilities + 16 * kKeyBlock + g * 32, kKeyBlock * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, product_ + d, padded_ * 4);
      _tile_stored(1, product_ + d + 16, padded_ * 4);
      if (two) {
        _tile_stored(2, product_ + 16 * padded_ + d, padded_ * 4);
        _tile_stored(3, product_ + 16 * padded_ + d + 16, padded_ * 4);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Floats16 factor = set1(shrink[r]);
      float *to = out + r * padded_, *product = product_ + r * padded_;
      for (int64_t d = 0; d < padded_; d += 16) store(to + d, fma(load(to + d), factor, load(product + d)));
    }
  }

 private:
  // Returns the values of units 2 g and 2 g + 1: in place, or a copy if they lie apart (blocks of 16) or the second one
  // is missing.
  const uint16_t* values_of(const KeyBlock<uint16_t>& block, int64_t g) const {
    const int64_t unit = kUnit * padded_;
    const uint16_t* first = block.values[2 * g];
    const bool both = 2 * g + 1 < block.units;
    if (both && block.values[2 * g + 1] == first + unit) return first;
    uint16_t* copy = values_ + g * 2 * unit;
    std::memcpy(copy, first, static_cast<size_t>(unit) * 2);
    if (both) std::memcpy(copy + unit, block.values[2 * g + 1], static_cast<size_t>(unit) * 2);
    if (!both) std::memset(copy + unit, 0, static_cast<size_t>(unit) * 2);
    return copy;
  }

  const int64_t padded_;
  float* product_;    // [32][Dp]
  uint16_t* values_;  // [2][32][Dp]: copies of values_of
};

}  // namespace

void attention(const AttentionArgs& a) { run_attention<TileProducts>(a); }

}  // namespace amx
}  // namespace fd
