// The input of int8 linears.
//
// A row is cut into groups of 64 k, each with a scale of its own, 2^-15 of its largest magnitude: x = scale * q, where
// q is an integer of 16 bits. The sum of q * w over a group is computed in integers, so it is exact, and the same in
// any order. The weights are stored as 128 + w, without a sign. So each sum begins at `start`, -128 times the sum of q.
//
// All functions are static: simd.h gives the reason.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "weights/quantize_group.h"

namespace fd {
namespace FD_ISA {

#if defined(__AMX_INT8__)
constexpr int kRows = 16;  // of a product: a tile
#elif defined(__AVX512VNNI__)
constexpr int kRows = 12;  // of a product: 24 of 32 registers are sums
#else
constexpr int kRows = 2;  // of a product: 8 of 16 registers are sums
#endif

constexpr int64_t kQuads = kInt8Group / 4;
constexpr float kLargestInput = 32512.0f;  // 127 * 256, whose high digit is 127

// The rows of an input in blocks of equal width, at most kRows. Rows that fill up the last block are undefined, and so
// are their results.
//
//   AMX           digits [blocks][groups][high, low][width][64]: q = 256 * high + low, both of 8 bits
//   AVX512_VNNI   digits [blocks][groups][high, low][16 quads][width][4]
//   AVX2          numbers q [blocks][groups][16 quads][width][4], each of 16 bits
//   all           then scales, then starts [blocks][groups][width]
class InputGroups {
 public:
  InputGroups(const void* data, int64_t m, const Weight& w)
      : groups_(w.groups()),
        blocks_(m > 0 ? (m + kRows - 1) / kRows : 1),
        width_((m + blocks_ - 1) / blocks_),
        digits_(static_cast<char*>(const_cast<void*>(data))),
        scales_(reinterpret_cast<float*>(digits_ + blocks_ * groups_ * group_bytes())),
        starts_(reinterpret_cast<int32_t*>(scales_ + blocks_ * groups_ * width_)) {}

  static size_t bytes(int64_t m, const Weight& w) {
    return static_cast<size_t>((m + kRows) * w.groups() * (2 * kInt8Group + 8));
  }

  const void* data() const { return digits_; }
  int64_t groups() const { return groups_; }
  int64_t blocks() const { return blocks_; }
  int64_t width() const { return width_; }
  int64_t group_bytes() const { return 2 * kInt8Group * width_; }
  const char* digits(int64_t block, int64_t group) const { return digits_ + (block * groups_ + group) * group_bytes(); }
  const float* scales(int64_t block, int64_t group) const { return scales_ + (block * groups_ + group) * width_; }
  const int32_t* starts(int64_t block, int64_t group) const { return starts_ + (block * groups_ + group) * width_; }

  // x: the values of a group of a row, which is `lane` of its block.
  void put(int64_t block, int64_t lane, int64_t group, const float* x) const {
    const int64_t at = block * groups_ + group;
    int32_t q[kInt8Group];
    starts_[at * width_ + lane] = -128 * quantize_group(x, kLargestInput, q, scales_ + at * width_ + lane);
    store(q, digits_ + at * group_bytes(), lane);
  }

  // The values of a row, [groups * 64].
  void get(int64_t row, float* x) const {
    const int64_t block = row / width_, lane = row % width_;
    for (int64_t g = 0; g < groups_; ++g, x += kInt8Group) load(digits(block, g), lane, scales(block, g)[lane], x);
  }

 private:
#if defined(__AMX_INT8__)
  void store(const int32_t* q, char* to, int64_t lane) const {
    char *high = to + lane * kInt8Group, *low = high + width_ * kInt8Group;
    for (int i = 0; i < kInt8Group; ++i) high[i] = static_cast<char>((q[i] + 128) >> 8);
    for (int i = 0; i < kInt8Group; ++i) low[i] = static_cast<char>(q[i]);
  }
  void load(const char* from, int64_t lane, float scale, float* x) const {
    const int8_t *high = reinterpret_cast<const int8_t*>(from) + lane * kInt8Group, *low = high + width_ * kInt8Group;
    for (int i = 0; i < kInt8Group; ++i) x[i] = static_cast<float>(high[i] * 256 + low[i]) * scale;
  }
#elif defined(__AVX512VNNI__)
  void store(const int32_t* q, char* to, int64_t lane) const {
    char digits[2][kInt8Group];
    for (int i = 0; i < kInt8Group; ++i) digits[0][i] = static_cast<char>((q[i] + 128) >> 8);
    for (int i = 0; i < kInt8Group; ++i) digits[1][i] = static_cast<char>(q[i]);
    const int64_t step = width_ * 4;  // `to` may alias width_
    to += lane * 4;
    for (int64_t i = 0; i < 2 * kQuads; ++i, to += step) std::memcpy(to, digits[0] + i * 4, 4);
  }
  void load(const char* from, int64_t lane, float scale, float* x) const {
    int8_t digits[2][kInt8Group];
    for (int64_t i = 0; i < 2 * kQuads; ++i) std::memcpy(digits[0] + i * 4, from + (i * width_ + lane) * 4, 4);
    for (int i = 0; i < kInt8Group; ++i) x[i] = static_cast<float>(digits[0][i] * 256 + digits[1][i]) * scale;
  }
#else
  void store(const int32_t* q, char* to, int64_t lane) const {
    int16_t numbers[kInt8Group];
    for (int i = 0; i < kInt8Group; ++i) numbers[i] = static_cast<int16_t>(q[i]);
    for (int64_t i = 0; i < kQuads; ++i) std::memcpy(to + (i * width_ + lane) * 8, numbers + i * 4, 8);
  }
  void load(const char* from, int64_t lane, float scale, float* x) const {
    int16_t numbers[kInt8Group];
    for (int64_t i = 0; i < kQuads; ++i) std::memcpy(numbers + i * 4, from + (i * width_ + lane) * 8, 8);
    for (int i = 0; i < kInt8Group; ++i) x[i] = static_cast<float>(numbers[i]) * scale;
  }
#endif

  int64_t groups_, blocks_, width_;
  char* digits_;
  float* scales_;
  int32_t* starts_;
};

}  // namespace FD_ISA
}  // namespace fd
