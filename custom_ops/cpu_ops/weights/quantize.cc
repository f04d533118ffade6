// int8 values of a packed bfloat16 weight: of each 64 k of a column, w = scale * q with q from -127 to 127, rounded to
// nearest even, and scale = largest magnitude / 127. quantize_group.h has the rules.
#include <cstring>

#include "kernels.h"
#include "weights/quantize_group.h"

namespace fd {
namespace FD_ISA {

typedef uint32_t Bits __attribute__((vector_size(kColumns * 4)));  // one value of each column
typedef float Floats __attribute__((vector_size(kColumns * 4)));

void quantize_tile(const Weight& w, int64_t tile) {
  const uint16_t* from = static_cast<const uint16_t*>(w.data) + tile * w.tile_elements();
  char* to = w.int8 + tile * w.int8_tile_bytes();
  for (int64_t g = 0; g < w.groups(); ++g, to += kInt8GroupBytes) {
    const int64_t first = g * kInt8Group, count = w.k_padded - first < kInt8Group ? w.k_padded - first : kInt8Group;
    Bits pairs[kInt8Group / 2];  // of two k: the first one in the low half
    std::memcpy(pairs, from + first * kColumns, static_cast<size_t>(count) * kColumns * 2);
    Bits most = {};
    for (int64_t p = 0; p < count / 2; ++p) {
      const Bits low = pairs[p] << 16 & 0x7fffffff, high = pairs[p] & 0x7fff0000;
      const Bits larger = low > high ? low : high;
      most = most > larger ? most : larger;
    }
    float scale[kColumns], inverses[kColumns];
    uint32_t columns[kColumns];
    for (int64_t c = 0; c < kColumns; ++c)
      columns[c] = group_scale(most[c], 127.0f, scale + c, inverses + c) ? 0xff : 0;
    std::memcpy(to, scale, sizeof(scale));
    Bits kept;
    Floats inverse;
    std::memcpy(&kept, columns, sizeof(kept));
    std::memcpy(&inverse, inverses, sizeof(inverse));
    char* quads = to + sizeof(scale);
    std::memset(quads, 128, kInt8Group * kColumns);
    const auto byte = [&](Bits bits) {
      const Floats rounded = reinterpret_cast<Floats>(bits) * inverse + kRound;
      return ((reinterpret_cast<Bits>(rounded) & kept) + 128) & 0xff;
    };
    for (int64_t quad = 0; quad < count / 4; ++quad) {
      const Bits one = pairs[quad * 2], two = pairs[quad * 2 + 1];
      const Bits packed =
          byte(one << 16) | byte(one & 0xffff0000) << 8 | byte(two << 16) << 16 | byte(two & 0xffff0000) << 24;
      std::memcpy(quads + quad * sizeof(packed), &packed, sizeof(packed));
    }
  }
}

}  // namespace FD_ISA
}  // namespace fd
