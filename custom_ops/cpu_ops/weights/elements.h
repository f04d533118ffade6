// Reading elements of a checkpoint's tensors, for packing.
#pragma once

#include <cstdint>
#include <cstring>

namespace fd {

static inline uint16_t to_bf16(uint32_t bits) {
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Checkpoint tensors may sit at any byte offset of a file, hence memcpy.
template <typename T>
static inline T load_at(const char* base, int64_t index) {
  T value;
  std::memcpy(&value, base + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// The bits of a float32, or of a bfloat16 as a float32.
template <bool SourceBf16>
static inline uint32_t load_float_bits(const char* row, int64_t k) {
  return SourceBf16 ? static_cast<uint32_t>(load_at<uint16_t>(row, k)) << 16 : load_at<uint32_t>(row, k);
}

}  // namespace fd
