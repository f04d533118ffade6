// Kernels on rows of packed weights: conversion, check and fingerprint, packing and unpacking.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "weights/elements.h"
#include "weights/staging.h"

namespace fd {
namespace FD_ISA {
namespace {

// A tile is a transpose of 16 x 16 words of 4 bytes: floats, or pairs of bfloat16.
constexpr int64_t kTileWords = 16;
constexpr int64_t kTileRowBytes = kTileWords * 4;

#if defined(__AVX512F__)

// Transposes 16 rows of 64 bytes. stream: `out` is aligned to 64 bytes, and written past the caches.
template <bool Stream>
void transpose(const char* in, int64_t in_stride, char* out, int64_t out_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * in_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + c]: words c of rows i .. i + 3, in each lane of 128 bits
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i low_even = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88),
                  low_odd = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
    const __m512i rows[4] = {
        _mm512_shuffle_i32x4(low_even, high_even, 0x88), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88),
        _mm512_shuffle_i32x4(low_even, high_even, 0xdd), _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd)};
    for (int q = 0; q < 4; ++q) {
      char* to = out + (q * 4 + c) * out_stride;
      Stream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(to), rows[q]) : _mm512_storeu_si512(to, rows[q]);
    }
  }
}

// Words of 4 bytes.
using Lanes = __m512i;
Lanes load_lanes(const void* p) { return _mm512_loadu_si512(p); }
Lanes set_lanes(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
Lanes odd_lanes(Lanes v) { return _mm512_srli_epi64(v, 32); }
// Adds the products of even words to sums of 8 bytes.
Lanes add_products(Lanes sums, Lanes a, Lanes b) { return _mm512_add_epi64(sums, _mm512_mul_epu32(a, b)); }
template <bool Halves>
Lanes larger(Lanes most, Lanes words, Lanes magnitude) {
  words = _mm512_and_si512(words, magnitude);
  return Halves ? _mm512_max_epu16(most, words) : _mm512_max_epu32(most, words);
}

#else

using Lanes = __m256i;
Lanes load_lanes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
Lanes set_lanes(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
Lanes odd_lanes(Lanes v) { return _mm256_srli_epi64(v, 32); }
Lanes add_products(Lanes sums, Lanes a, Lanes b) { return _mm256_add_epi64(sums, _mm256_mul_epu32(a, b)); }
template <bool Halves>
Lanes larger(Lanes most, Lanes words, Lanes magnitude) {
  words = _mm256_and_si256(words, magnitude);
  return Halves ? _mm256_max_epu16(most, words) : _mm256_max_epu32(most, words);
}

template <bool Stream>
void transpose_8(const char* in, int64_t in_stride, char* out, int64_t out_stride) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i * in_stride));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int c = 0; c < 8; ++c) {
    const __m256i row =
        c < 4 ? _mm256_permute2x128_si256(a[c], a[c + 4], 0x20) : _mm256_permute2x128_si256(a[c - 4], a[c], 0x31);
    auto* to = reinterpret_cast<__m256i*>(out + c * out_stride);
    Stream ? _mm256_stream_si256(to, row) : _mm256_storeu_si256(to, row);
  }
}

template <bool Stream>
void transpose(const char* in, int64_t in_stride, char* out, int64_t out_stride) {
  for (int column = 0; column < 2; ++column)  // of the output, so that both halves of its lines are written in turn
    for (int row = 0; row < 2; ++row)
      transpose_8<Stream>(in + row * 8 * in_stride + column * 32, in_stride, out + column * 8 * out_stride + row * 32,
                          out_stride);
}

#endif

constexpr int64_t kLanes = sizeof(Lanes) / 4;

// The sums of words at `p` with their keys, and the largest magnitude of their values.
template <bool Bf16>
struct Words {
  static constexpr uint32_t kMagnitude = Bf16 ? 0x7fff7fffu : 0x7fffffffu;
  static constexpr uint32_t kInfinity = Bf16 ? 0x7f80u : 0x7f800000u;

  uint32_t largest = 0;

  void see(uint32_t word) {
    largest = Bf16 ? std::max({largest, word & 0x7fff, word >> 16 & 0x7fff}) : std::max(largest, word & kMagnitude);
  }
  bool finite() const { return largest < kInfinity; }

  // Words [first, first + n) of one block.
  void add(const char* p, int64_t first, int64_t n, uint64_t* sums) {
    const uint32_t *keys0 = kWordKeys.keys[0] + first, *keys1 = kWordKeys.keys[1] + first;
    int64_t i = add_vectors(p, keys0, keys1, n, sums);
    for (; i < n; ++i) {
      const uint32_t word = load_at<uint32_t>(p, i);
      see(word);
      sums[0] += uint64_t{word} * keys0[i];
      sums[1] += uint64_t{word} * keys1[i];
    }
  }

 private:
  static uint64_t total(Lanes v) {
    alignas(64) uint64_t lanes[kLanes / 2];
    std::memcpy(lanes, &v, sizeof(v));
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    return sum;
  }

  int64_t add_vectors(const char* p, const uint32_t* keys0, const uint32_t* keys1, int64_t n, uint64_t* sums) {
    const Lanes magnitude = set_lanes(kMagnitude);
    Lanes even0 = {}, even1 = {}, odd0 = {}, odd1 = {}, most = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Lanes words = load_lanes(p + i * 4), k0 = load_lanes(keys0 + i), k1 = load_lanes(keys1 + i);
      even0 = add_products(even0, words, k0);
      even1 = add_products(even1, words, k1);
      odd0 = add_products(odd0, odd_lanes(words), odd_lanes(k0));
      odd1 = add_products(odd1, odd_lanes(words), odd_lanes(k1));
      most = larger<Bf16>(most, words, magnitude);
    }
    sums[0] += total(even0) + total(odd0);
    sums[1] += total(even1) + total(odd1);
    alignas(64) uint32_t lanes[kLanes];
    std::memcpy(lanes, &most, sizeof(most));
    for (const uint32_t lane : lanes) see(lane);
    return i;
  }
};

template <bool Bf16>
bool check_values(const char* p, int64_t first, int64_t n, Fingerprint& total) {
  Words<Bf16> words;
  BlockSums block = {first / (Bf16 ? 2 : 1) / kFingerprintBlock, {}};
  int64_t at = first;
  const int64_t end = first + n;
  const auto add_half = [&] {  // of a word whose other half is another piece's, or nobody's
    const uint32_t word = static_cast<uint32_t>(load_at<uint16_t>(p, at - first)) << (at % 2 * 16);
    if (at / 2 / kFingerprintBlock != block.block) block.move_to(at / 2 / kFingerprintBlock, total);
    for (int s = 0; s < 2; ++s) block.sums.sums[s] += uint64_t{word} * kWordKeys.keys[s][at / 2 % kFingerprintBlock];
    words.see(word);
    ++at;
  };
  if (Bf16 && at % 2 == 1 && at < end) add_half();
  constexpr int64_t kPerWord = Bf16 ? 2 : 1;
  for (int64_t word = at / kPerWord; word < end / kPerWord;) {
    const int64_t index = word / kFingerprintBlock, offset = word % kFingerprintBlock;
    const int64_t count = std::min(kFingerprintBlock - offset, end / kPerWord - word);
    if (index != block.block) block.move_to(index, total);
    words.add(p + (word * kPerWord - first) * (Bf16 ? 2 : 4), offset, count, block.sums.sums);
    word += count;
    at = word * kPerWord;
  }
  if (Bf16 && at < end) add_half();
  block.move_to(0, total);
  return words.finite();
}

bool check(bool bf16, const void* values, int64_t first, int64_t n, Fingerprint& sum) {
  const char* p = static_cast<const char*>(values);
  return bf16 ? check_values<true>(p, first, n, sum) : check_values<false>(p, first, n, sum);
}

// The bits of a float16 as those of a float32. Denormals become normal without an operation on denormals.
uint32_t widen_f16(uint16_t half) {
  const uint32_t exponent = half & 0x7c00u, shifted = (half & 0x7fffu) << 13;
  uint32_t bits = shifted + (112u << 23);
  if (exponent == 0x7c00u) bits = shifted | 0x7f800000u;
  if (exponent == 0) {
    const uint32_t biased = shifted | (113u << 23), unit = 113u << 23;
    float value, least;
    std::memcpy(&value, &biased, 4);
    std::memcpy(&least, &unit, 4);
    value -= least;
    std::memcpy(&bits, &value, 4);
  }
  return bits | (half & 0x8000u) << 16;
}

template <typename Widen>
void convert_with(Widen widen, int64_t n, bool bf16, void* values) {
  if (bf16) {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(values)[i] = to_bf16(widen(i));
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<uint32_t*>(values)[i] = widen(i);
  }
}

void convert(Kind kind, const void* source, int64_t n, bool bf16, void* values) {
  const char* p = static_cast<const char*>(source);
  if (kind == (bf16 ? Kind::kBf16 : Kind::kF32)) {
    std::memcpy(values, source, static_cast<size_t>(n * bytes_of(kind)));
  } else if (kind == Kind::kF32) {
    convert_with([p](int64_t i) { return load_float_bits<false>(p, i); }, n, bf16, values);
  } else if (kind == Kind::kBf16) {
    convert_with([p](int64_t i) { return load_float_bits<true>(p, i); }, n, bf16, values);
  } else {
    convert_with([p](int64_t i) { return widen_f16(load_at<uint16_t>(p, i)); }, n, bf16, values);
  }
}

// The element (row, k) of a packed weight.
template <typename T>
T* element(const Weight& w, int64_t row, int64_t k) {
  T* tile = static_cast<T*>(w.data) + row / kColumns * w.tile_elements();
  return sizeof(T) == 2 ? tile + k / 2 * 32 + row % kColumns * 2 + k % 2 : tile + k * kColumns + row % kColumns;
}

// Values [n, columns] of the columns from `column` on.
template <typename T>
void pack_values(Weight& w, int64_t first, int64_t n, int64_t column, int64_t columns, const char* values) {
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(T));
  const int64_t whole = row_bytes / kTileRowBytes;  // tiles along k
  for (int64_t i = 0; i < n;) {
    const char* row = values + i * row_bytes;
    const bool tile = (first + i) % kColumns == 0 && n - i >= kColumns;
    const int64_t rows = tile ? kColumns : 1;
    if (tile) {
      char* out = reinterpret_cast<char*>(element<T>(w, first + i, column));
      for (int64_t t = 0; t < whole; ++t)
        transpose<true>(row + t * kTileRowBytes, row_bytes, out + t * kTileRowBytes * kColumns, kTileRowBytes);
    }
    const int64_t edge = tile ? whole * kTileRowBytes / static_cast<int64_t>(sizeof(T)) : 0;
    for (int64_t k = edge; k < columns; ++k)
      for (int64_t r = 0; r < rows; ++r) *element<T>(w, first + i + r, column + k) = load_at<T>(row + r * row_bytes, k);
    i += rows;
  }
  _mm_sfence();  // other threads see what was written past the caches
}

template <typename T>
void unpack_values(const Weight& w, int64_t first, int64_t n, char* values) {
  const int64_t row_bytes = w.k * static_cast<int64_t>(sizeof(T));
  const int64_t whole = row_bytes / kTileRowBytes;
  for (int64_t i = 0; i < n;) {
    char* row = values + i * row_bytes;
    const bool tile = (first + i) % kColumns == 0 && n - i >= kColumns;
    const int64_t rows = tile ? kColumns : 1;
    if (tile) {
      const char* in = reinterpret_cast<const char*>(element<T>(w, first + i, 0));
      for (int64_t t = 0; t < whole; ++t)
        transpose<false>(in + t * kTileRowBytes * kColumns, kTileRowBytes, row + t * kTileRowBytes, row_bytes);
    }
    const int64_t edge = tile ? whole * kTileRowBytes / static_cast<int64_t>(sizeof(T)) : 0;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = edge; k < w.k; ++k)
        std::memcpy(row + r * row_bytes + k * static_cast<int64_t>(sizeof(T)), element<T>(w, first + i + r, k),
                    sizeof(T));
    i += rows;
  }
}

void pack_block(Weight& w, int64_t first, int64_t n, int64_t column, int64_t columns, const void* values) {
  const char* from = static_cast<const char*>(values);
  w.bf16 ? pack_values<uint16_t>(w, first, n, column, columns, from)
         : pack_values<uint32_t>(w, first, n, column, columns, from);
}

void pack(Weight& w, int64_t first, int64_t n, const void* values) { pack_block(w, first, n, 0, w.k, values); }

// Words of 4 bytes of 16 rows of the source: floats, or the pairs of bfloat16 of two of its rows.
template <typename T>
void gather_words(const char* in, int64_t in_bytes, uint32_t* words) {
  for (int64_t i = 0; i < kTileWords; ++i, words += kTileWords) {
    if (sizeof(T) == 4) {
      std::memcpy(words, in + i * in_bytes, kTileRowBytes);
      continue;
    }
    const char *even = in + 2 * i * in_bytes, *odd = even + in_bytes;
    for (int64_t n = 0; n < kTileWords; ++n)
      words[n] = load_at<uint16_t>(even, n) | static_cast<uint32_t>(load_at<uint16_t>(odd, n)) << 16;
  }
}

template <typename T>
void transpose_values(const char* values, int64_t rows, int64_t columns, char* out) {
  constexpr int64_t kSize = sizeof(T), kTileColumns = kTileRowBytes / kSize;
  const int64_t whole_rows = rows / kTileWords * kTileWords, whole_columns = columns / kTileColumns * kTileColumns;
  alignas(64) uint32_t words[kTileWords * kTileWords];
  for (int64_t c = 0; c < whole_columns; c += kTileColumns)
    for (int64_t r = 0; r < whole_rows; r += kTileWords) {
      gather_words<T>(values + (c * rows + r) * kSize, rows * kSize, words);
      transpose<false>(reinterpret_cast<const char*>(words), kTileRowBytes, out + (r * columns + c) * kSize,
                       columns * kSize);
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c)
      std::memcpy(out + (r * columns + c) * kSize, values + (c * rows + r) * kSize, kSize);
}

void transpose_block(bool bf16, const void* values, int64_t rows, int64_t columns, void* out) {
  const char* from = static_cast<const char*>(values);
  char* to = static_cast<char*>(out);
  bf16 ? transpose_values<uint16_t>(from, rows, columns, to) : transpose_values<uint32_t>(from, rows, columns, to);
}

void unpack(const Weight& w, int64_t first, int64_t n, void* values) {
  char* to = static_cast<char*>(values);
  w.bf16 ? unpack_values<uint16_t>(w, first, n, to) : unpack_values<uint32_t>(w, first, n, to);
}

}  // namespace

extern const RowKernels kRowKernels = {convert, check, transpose_block, pack_block, pack, unpack};

}  // namespace FD_ISA
}  // namespace fd
