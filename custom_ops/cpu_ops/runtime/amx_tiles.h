// Use of the AMX tile registers. All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fd {
namespace amx {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configures accumulators 0 and 1 and input tile 4 with `rows` rows, 2, 3 and 5 with `more_rows`, weight tiles 6 and 7
// with 16. A row has 64 bytes.
static inline void configure_tiles(int64_t rows, int64_t more_rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    const bool more = t == 2 || t == 3 || t == 5;
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<uint8_t>(t >= 6 ? 16 : more ? more_rows : rows);
  }
  __asm__ volatile("" : : "m"(config));  // GCC 12 believes that the next line reads 8 bytes only
  _tile_loadconfig(&config);
}

static inline void configure_tiles(int64_t rows) { configure_tiles(rows, rows); }

}  // namespace amx
}  // namespace fd
