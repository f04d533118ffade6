// The tokens of a row of logits, and the selection of the best of them. All functions are static: runtime/simd.h gives
// the reason.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

// Sums float weights in double, per block of 16 lanes x 64, so that a vocabulary of any size is exact enough.
constexpr int64_t kBlock = 1024;

struct Candidate {
  float logit;
  int32_t id;
};

static inline bool better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The logits of a row. Those whose bit in `allowed` is 0 count as -inf; null = all are allowed.
struct Logits {
  const float* x;
  int64_t n;
  const uint32_t* allowed;

  Mask allowed_lanes(int64_t i) const { return allowed == nullptr ? 0xffff : (allowed[i / 32] >> (i % 32)) & 0xffff; }
  // Of ids i to i + count, multiples of 32.
  bool none_allowed(int64_t i, int64_t count) const {
    if (allowed == nullptr) return false;
    uint32_t any = 0;
    for (int64_t word = i / 32; word < (i + count) / 32; ++word) any |= allowed[word];
    return any == 0;
  }
  Floats16 full(int64_t i) const {  // 16 logits from i on, a multiple of 16
    return allowed == nullptr ? load(x + i) : select(allowed_lanes(i), load(x + i), set1(-INFINITY));
  }
  Floats16 at(int64_t i, int* count) const {
    *count = static_cast<int>(std::min<int64_t>(16, n - i));
    if (*count == 16) return full(i);
    return select(((1u << *count) - 1) & allowed_lanes(i), load_n(x + i, *count), set1(-INFINITY));
  }
};

// Finds the lowest id of the largest logits. The id is -1 if the row is not finite: it has a NaN or +inf, or only -inf.
static inline Candidate argmax(const Logits& x) {
  const int64_t n = x.n;
  Floats16 top[4] = {set1(-INFINITY), set1(-INFINITY), set1(-INFINITY), set1(-INFINITY)};
  Mask numbers = 0xffff;  // NaN is not equal to itself
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    if (x.none_allowed(i, 64)) continue;
    for (int c = 0; c < 4; ++c) {
      const Floats16 v = x.full(i + 16 * c);
      numbers &= equal(v, v);
      top[c] = max(v, top[c]);
    }
  }
  for (int count; i < n; i += 16) {
    const Floats16 v = x.at(i, &count);
    numbers &= equal(v, v);
    top[0] = max(v, top[0]);
  }
  const float best = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
  if (numbers != 0xffff || !std::isfinite(best)) return {best, -1};
  int32_t id = -1;
  for (i = 0; id < 0; i += 16) {
    int count;
    const Mask same = equal(x.at(i, &count), set1(best)) & ((1u << count) - 1);
    if (same != 0) id = static_cast<int32_t>(i + __builtin_ctz(same));
  }
  return {best, id};
}

// Lanes at or before the boundary.
static inline Mask kept_lanes(Floats16 logits, int64_t i, Candidate boundary) {
  Mask kept = greater(logits, set1(boundary.logit));
  const int64_t before = boundary.id - i + 1;  // among equal logits, ids up to the boundary's count
  if (before > 0) {
    const Mask ids = before >= 16 ? 0xffff : (1u << before) - 1;
    kept |= equal(logits, set1(boundary.logit)) & ids;
  }
  return kept;
}

// Rearranges [begin, end) around a pivot, best first, and returns the pivot's place. Median of three: nothing random.
static inline Candidate* partition(Candidate* begin, Candidate* end) {
  Candidate* middle = begin + (end - begin) / 2;
  Candidate* last = end - 1;
  if (better(*middle, *begin)) std::swap(*middle, *begin);
  if (better(*last, *begin)) std::swap(*last, *begin);
  if (better(*last, *middle)) std::swap(*last, *middle);
  std::swap(*middle, *last);
  Candidate* place = begin;
  for (Candidate* c = begin; c != last; ++c)
    if (better(*c, *last)) std::swap(*c, *place++);
  std::swap(*place, *last);
  return place;
}

// Moves the k best to the front, the k-th at [k - 1].
static inline void select_best(Candidate* begin, Candidate* end, int64_t k) {
  Candidate* target = begin + (k - 1);
  while (end - begin > 1) {
    Candidate* pivot = partition(begin, end);
    if (pivot == target) return;
    if (target < pivot) {
      end = pivot;
    } else {
      begin = pivot + 1;
    }
  }
}

}  // namespace FD_ISA
}  // namespace fd
