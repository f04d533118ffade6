// Fingerprints of weights (fastdeploy/core/fingerprint.py defines them): two sums modulo 2^64 over all values of a
// tensor. Each value counts for itself, so parts of a tensor can be added in any order, and a change of one value costs
// one product.
//
// All functions are static, because files that include this one are compiled with different -m flags (see simd.h).
#pragma once

#include <cstdint>

namespace fd {

constexpr int64_t kFingerprintBlock = 1024;  // words

struct Fingerprint {
  uint64_t sums[2];
};

// splitmix64.
static constexpr uint64_t split_mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct WordKeys {
  uint32_t keys[2][kFingerprintBlock];  // odd
};

static constexpr WordKeys make_word_keys() {
  WordKeys words = {};
  for (int s = 0; s < 2; ++s)
    for (int64_t t = 0; t < kFingerprintBlock; ++t)
      words.keys[s][t] = static_cast<uint32_t>(split_mix(static_cast<uint64_t>(s * kFingerprintBlock + t)) >> 32) | 1;
  return words;
}

alignas(64) static constexpr WordKeys kWordKeys = make_word_keys();

static constexpr uint64_t block_key(int64_t block) {
  return split_mix((uint64_t{1} << 32) + static_cast<uint64_t>(block)) | 1;
}

// The sums of one block, before the product with its key.
struct BlockSums {
  int64_t block = 0;
  Fingerprint sums = {};

  void move_to(int64_t next, Fingerprint& total) {
    const uint64_t key = block_key(block);
    for (int s = 0; s < 2; ++s) total.sums[s] += sums.sums[s] * key;
    *this = {next, {}};
  }
};

}  // namespace fd
