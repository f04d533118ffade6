// The integers of a group of 64 values, which share a scale: of weights and of inputs.
//
// All functions are static: simd.h gives the reason.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace fd {
namespace FD_ISA {

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum with it has the nearest integer in its low bits
constexpr int32_t kRoundBits = 0x4b400000;

// The scale of a group and its inverse. most: the bits of the largest magnitude. Returns false if all integers are 0:
// for a value that is not finite, with the scale NaN, and for magnitudes below 2^-100, so that no inverse is infinite.
static inline bool group_scale(uint32_t most, float largest, float* scale, float* inverse) {
  constexpr uint32_t kTiny = (127u - 100) << 23, kInfinity = 0x7f800000;
  if (most < kTiny || most >= kInfinity) {
    *scale = most < kTiny ? 0.0f : NAN;
    *inverse = 0.0f;
    return false;
  }
  float peak;
  std::memcpy(&peak, &most, 4);
  *inverse = largest / peak;
  *scale = peak / largest;
  return true;
}

// Integers q from -largest to largest with x = scale * q, within half of scale, for a group; see group_scale. Returns
// the sum of q.
static inline int32_t quantize_group(const float* x, float largest, int32_t* q, float* scale) {
  uint32_t bits[kInt8Group], most = 0;
  std::memcpy(bits, x, sizeof(bits));
  for (uint32_t value : bits) most = (value & 0x7fffffff) > most ? value & 0x7fffffff : most;
  float inverse, rounded[kInt8Group];
  if (!group_scale(most, largest, scale, &inverse)) {
    std::memset(q, 0, kInt8Group * 4);
    return 0;
  }
  for (int i = 0; i < kInt8Group; ++i) rounded[i] = x[i] * inverse + kRound;
  std::memcpy(q, rounded, sizeof(rounded));
  int32_t sum = 0;
  for (int i = 0; i < kInt8Group; ++i) sum += q[i] -= kRoundBits;
  return sum;
}

}  // namespace FD_ISA
}  // namespace fd
