// Fingerprints of weights (fastdeploy/core/fingerprint.py defines them): two sums modulo 2^64 over all values of a
// tensor. Each value counts for itself, so parts of a tensor can be added in any order, and a change of one value costs
// one product.
#pragma once

#include <cstdint>

namespace fd {

constexpr int64_t kFingerprintBlock = 1024;  // words

struct Fingerprint {
  uint64_t sums[2];
};

// splitmix64.
inline uint64_t split_mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct WordKeys {
  uint32_t keys[2][kFingerprintBlock];  // odd

  WordKeys() {
    for (int s = 0; s < 2; ++s)
      for (int64_t t = 0; t < kFingerprintBlock; ++t)
        keys[s][t] = static_cast<uint32_t>(split_mix(static_cast<uint64_t>(s * kFingerprintBlock + t)) >> 32) | 1;
  }
};

inline const WordKeys& word_keys() {
  static const WordKeys keys;
  return keys;
}

inline uint64_t block_key(int64_t block) { return split_mix((uint64_t{1} << 32) + static_cast<uint64_t>(block)) | 1; }

// The change of word `t` of a tensor by `difference` (new - old, modulo 2^64).
inline void add_change(Fingerprint& f, int64_t t, uint64_t difference) {
  const WordKeys& words = word_keys();
  const uint64_t weighted = difference * block_key(t / kFingerprintBlock);
  for (int s = 0; s < 2; ++s) f.sums[s] += weighted * words.keys[s][t % kFingerprintBlock];
}

// The change of value `i` of a tensor, float32 or bfloat16 bits.
inline void add_change(Fingerprint& f, bool bf16, int64_t i, uint32_t old_bits, uint32_t new_bits) {
  const uint64_t difference = uint64_t{new_bits} - uint64_t{old_bits};
  bf16 ? add_change(f, i / 2, difference << (i % 2 * 16)) : add_change(f, i, difference);
}

}  // namespace fd
