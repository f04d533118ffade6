// Packing and unpacking. Both run on the thread that loads a checkpoint, beside steps, and so do not use the thread
// pool.
#include <cstdlib>
#include <cstring>
#include <new>

#include "elements.h"
#include "kernels.h"
#include "memory.h"

namespace fd {
namespace {

// One 16-column, 32-deep tile from bfloat16 rows: a transpose of 16 x 16 pairs. `stride` is in elements.
void pack_tile_bf16(const char* source, int64_t stride, uint16_t* tile) {
  uint32_t rows[16][16];
  for (int n = 0; n < 16; ++n) std::memcpy(rows[n], source + n * stride * 2, 64);
  uint32_t columns[16][16];
  for (int p = 0; p < 16; ++p)
    for (int n = 0; n < 16; ++n) columns[p][n] = rows[n][p];
  std::memcpy(tile, columns, sizeof(columns));
}

// Packs one column element by element: edges, conversions, and stacked parts that do not start on a whole tile.
template <bool SourceBf16>
void pack_column(Weight& w, const char* row, int64_t column) {
  const int64_t tile = column / kColumns, lane = column % kColumns;
  if (w.bf16) {
    uint16_t* out = static_cast<uint16_t*>(w.data) + tile * w.tile_elements() + lane * 2;
    for (int64_t k = 0; k < w.k; ++k) {
      const uint16_t bits = SourceBf16 ? load_at<uint16_t>(row, k) : to_bf16(load_float_bits<false>(row, k));
      out[k / 2 * 32 + k % 2] = bits;
    }
  } else {
    uint32_t* out = static_cast<uint32_t*>(w.data) + tile * w.tile_elements() + lane;
    for (int64_t k = 0; k < w.k; ++k) out[k * kColumns] = load_float_bits<SourceBf16>(row, k);
  }
}

// Packs sixteen columns into a float32 weight, in blocks that stay in L1.
template <bool SourceBf16>
void pack_columns_f32(Weight& w, const char* source, int64_t row_bytes, int64_t tile) {
  uint32_t* out = static_cast<uint32_t*>(w.data) + tile * w.tile_elements();
  for (int64_t k = 0; k < w.k; ++k)
    for (int n = 0; n < kColumns; ++n) out[k * kColumns + n] = load_float_bits<SourceBf16>(source + n * row_bytes, k);
}

void pack_columns_from_f32(Weight& w, const char* source, int64_t row_bytes, int64_t tile) {
  uint16_t* out = static_cast<uint16_t*>(w.data) + tile * w.tile_elements();
  for (int64_t k = 0; k < w.k; ++k)
    for (int n = 0; n < kColumns; ++n)
      out[k / 2 * 32 + n * 2 + k % 2] = to_bf16(load_float_bits<false>(source + n * row_bytes, k));
}

}  // namespace

Weight* new_weight(bool bf16, int64_t n, int64_t k, bool with_bias) {
  auto* w = new (std::nothrow) Weight{bf16, n, k, bf16 ? round_up(k, kDepth) : k, 0, nullptr, nullptr};
  if (w == nullptr) return nullptr;
  w->bytes = w->tiles() * w->tile_elements() * (bf16 ? 2 : 4);
  w->data = allocate_pages(static_cast<size_t>(w->bytes));
  if (with_bias) w->bias = static_cast<float*>(std::calloc(static_cast<size_t>(w->tiles() * kColumns), 4));
  if (w->data == nullptr || (with_bias && w->bias == nullptr)) {
    free_weight(w);
    return nullptr;
  }
  return w;
}

void free_weight(Weight* w) {
  if (w == nullptr) return;
  free_pages(w->data, static_cast<size_t>(w->bytes));
  std::free(w->bias);
  delete w;
}

void pack_rows(Weight& w, const void* source, bool source_bf16, int64_t first, int64_t n) {
  const char* base = static_cast<const char*>(source);
  const int64_t row_bytes = w.k * (source_bf16 ? 2 : 4);
  for (int64_t i = 0; i < n;) {
    const int64_t column = first + i;
    const char* row = base + i * row_bytes;
    if (column % kColumns != 0 || n - i < kColumns) {
      source_bf16 ? pack_column<true>(w, row, column) : pack_column<false>(w, row, column);
      ++i;
      continue;
    }
    const int64_t tile = column / kColumns;
    if (!w.bf16) {
      source_bf16 ? pack_columns_f32<true>(w, row, row_bytes, tile) : pack_columns_f32<false>(w, row, row_bytes, tile);
    } else if (!source_bf16) {
      pack_columns_from_f32(w, row, row_bytes, tile);
    } else {
      uint16_t* out = static_cast<uint16_t*>(w.data) + tile * w.tile_elements();
      const int64_t whole = w.k / kDepth;
      for (int64_t kt = 0; kt < whole; ++kt) pack_tile_bf16(row + kt * kDepth * 2, w.k, out + kt * kDepth * kColumns);
      for (int64_t k = whole * kDepth; k < w.k; ++k)
        for (int lane = 0; lane < kColumns; ++lane)
          out[k / 2 * 32 + lane * 2 + k % 2] = load_at<uint16_t>(row + lane * row_bytes, k);
    }
    i += kColumns;
  }
}

void unpack_rows(const Weight& w, void* target, int64_t first, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t tile = (first + i) / kColumns, lane = (first + i) % kColumns;
    if (w.bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(w.data) + tile * w.tile_elements() + lane * 2;
      uint16_t* to = static_cast<uint16_t*>(target) + i * w.k;
      for (int64_t k = 0; k < w.k; ++k) to[k] = from[k / 2 * 32 + k % 2];
    } else {
      const uint32_t* from = static_cast<const uint32_t*>(w.data) + tile * w.tile_elements() + lane;
      uint32_t* to = static_cast<uint32_t*>(target) + i * w.k;
      for (int64_t k = 0; k < w.k; ++k) to[k] = from[k * kColumns];
    }
  }
}

}  // namespace fd
