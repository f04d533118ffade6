// int8 values of a packed bfloat16 weight: of each 64 k of a column, w = scale * q with q from -127 to 127, rounded to
// nearest even, and scale = largest magnitude / 127. quantize_group.h has the rules.
#include <cstring>

#include "kernels.h"
#include "weights/quantize_group.h"

namespace fd {
namespace FD_ISA {

void quantize_tile(const Weight& w, int64_t tile) {
  const uint16_t* from = static_cast<const uint16_t*>(w.data) + tile * w.tile_elements();
  char* to = w.int8 + tile * w.int8_tile_bytes();
  for (int64_t g = 0; g < w.groups(); ++g, to += kInt8GroupBytes) {
    const int64_t first = g * kInt8Group, count = w.k_padded - first < kInt8Group ? w.k_padded - first : kInt8Group;
    alignas(64) float values[kColumns][kInt8Group] = {};
    for (int64_t k = 0; k < count; k += 2)
      for (int64_t c = 0; c < kColumns; ++c)
        for (int64_t i = 0; i < 2; ++i) {
          const uint32_t bits = static_cast<uint32_t>(from[(first + k) * kColumns + c * 2 + i]) << 16;
          std::memcpy(&values[c][k + i], &bits, 4);
        }
    for (int64_t c = 0; c < kColumns; ++c) {
      int32_t q[kInt8Group];
      float scale;
      quantize_group(values[c], 127.0f, q, &scale);
      std::memcpy(to + c * 4, &scale, 4);
      for (int64_t k = 0; k < kInt8Group; ++k)
        to[kColumns * 4 + k / 4 * 64 + c * 4 + k % 4] = static_cast<char>(q[k] + 128);
    }
  }
}

}  // namespace FD_ISA
}  // namespace fd
