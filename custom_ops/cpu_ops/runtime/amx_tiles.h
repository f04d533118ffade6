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

// Configures accumulators 0..3 and input tiles 4 and 5 with `rows` rows, weight tiles 6 and 7 with 16. A row has 64
// bytes.
static inline void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<uint8_t>(t >= 6 ? 16 : rows);
  }
  _tile_loadconfig(&config);
}

}  // namespace amx
}  // namespace fd
