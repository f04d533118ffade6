// Sampling over the vocabulary, without sorting it. Compiled once per instruction set.
//
// Top-k, top-p and min-p each keep the best tokens down to some (logit, id), where the lowest id comes first among
// equal logits. So each filter moves one boundary, which is found by selection among a few candidates near the maximum.
// Then one pass in the order of ids draws. Logits are compared directly; only sums of weights need exp.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"
#include "vocabulary/candidates.h"

namespace fd {
namespace FD_ISA {
namespace {

// A row's distribution: weight(i) = exp((logit - best) / temperature), 0 beyond the boundary.
struct Row {
  Logits x;
  float best, inverse_temperature;

  Floats16 weight(Floats16 logits) const { return exp(mul(sub(logits, set1(best)), set1(inverse_temperature))); }
  // The scalar form gives the same bits as a lane.
  float weight_of(float logit) const {
    alignas(64) float lanes[16];
    store(lanes, weight(set1(logit)));
    return lanes[0];
  }
};

double block_mass(const Row& row, int64_t from, Candidate boundary) {
  Floats16 sum = zero();
  const int64_t end = std::min(row.x.n, from + kBlock);
  if (end - from == kBlock && row.x.none_allowed(from, kBlock)) return 0;
  for (int64_t i = from; i < end; i += 16) {
    int count;
    const Floats16 logits = row.x.at(i, &count);
    sum = add(sum, select(kept_lanes(logits, i, boundary), row.weight(logits), zero()));
  }
  return reduce_add(sum);
}

// Depths below the maximum, in units of temperature, at which the candidates of a selection can be cut.
constexpr int kDepths = 12;
constexpr float kDepthUnits[kDepths] = {0.5f, 1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 40};

struct Histogram {
  int64_t count[kDepths + 1];
  double mass[kDepths + 1];  // the last entry: the whole row
  float floor[kDepths + 1];  // the lowest logit of each
};

Histogram histogram(const Row& row) {
  Histogram h = {};
  for (int d = 0; d < kDepths; ++d) h.floor[d] = row.best - kDepthUnits[d] / row.inverse_temperature;
  h.floor[kDepths] = -INFINITY;
  for (int64_t from = 0; from < row.x.n; from += kBlock) {
    Floats16 sums[kDepths + 1];
    for (auto& s : sums) s = zero();
    const int64_t end = std::min(row.x.n, from + kBlock);
    for (int64_t i = from; i < end; i += 16) {
      int count;
      const Floats16 logits = row.x.at(i, &count);
      const Floats16 weights = row.weight(logits);
      sums[kDepths] = add(sums[kDepths], weights);
      for (int d = kDepths - 1; d >= 0; --d) {
        const Mask above = greater_equal(logits, set1(h.floor[d]));
        if (above == 0) break;
        h.count[d] += __builtin_popcount(above);
        sums[d] = add(sums[d], select(above, weights, zero()));
      }
    }
    for (int d = 0; d <= kDepths; ++d) h.mass[d] += reduce_add(sums[d]);
  }
  h.count[kDepths] = row.x.n;
  return h;
}

// All tokens with floor <= logit < ceiling.
int64_t collect(const Row& row, float floor, float ceiling, Candidate* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < row.x.n; i += 16) {
    int count;
    const Floats16 logits = row.x.at(i, &count);
    Mask inside = greater_equal(logits, set1(floor)) & greater(set1(ceiling), logits);
    inside &= ((1u << count) - 1) & row.x.allowed_lanes(i);
    for (; inside != 0; inside &= inside - 1) {
      const int64_t id = i + __builtin_ctz(inside);
      out[found++] = {row.x.x[id], static_cast<int32_t>(id)};
    }
  }
  return found;
}

double mass_of(const Row& row, const Candidate* begin, const Candidate* end) {
  double mass = 0;
  alignas(64) float lanes[16];
  for (const Candidate* c = begin; c < end; c += 16) {
    const int count = static_cast<int>(std::min<int64_t>(16, end - c));
    for (int i = 0; i < 16; ++i) lanes[i] = i < count ? c[i].logit : -INFINITY;
    mass += reduce_add(row.weight(load(lanes)));
  }
  return mass;
}

// The last of the smallest best-first set whose mass reaches `wanted`.
Candidate reach_mass(const Row& row, Candidate* begin, Candidate* end, double wanted) {
  Candidate* const all_end = end;
  while (end - begin > 1) {
    Candidate* pivot = partition(begin, end);
    const double ahead = mass_of(row, begin, pivot);
    if (ahead >= wanted) {
      end = pivot;
    } else if (ahead + row.weight_of(pivot->logit) >= wanted) {
      return *pivot;
    } else {
      wanted -= ahead + row.weight_of(pivot->logit);
      begin = pivot + 1;
    }
  }
  return begin < all_end ? *begin : *(all_end - 1);
}

// The last token that all filters keep.
Candidate find_boundary(const Row& row, int32_t top_k, float top_p, float min_p) {
  Candidate boundary = {-INFINITY, static_cast<int32_t>(row.x.n)};
  const bool use_k = top_k > 0 && top_k < row.x.n, use_p = top_p < 1.0f;
  if (use_k || use_p) {
    const Histogram h = histogram(row);
    int depth = 0;
    if (use_k) {
      while (h.count[depth] < top_k) ++depth;
    } else {
      // A margin, because sums in another order differ; the whole row always suffices.
      while (depth < kDepths && h.mass[depth] < top_p * h.mass[kDepths] * (1 + 1e-6)) ++depth;
    }
    // With one filter the boundary lies between two depths; with both, top-p needs all that top-k kept.
    const int above = use_k && use_p ? -1 : depth - 1;
    const int64_t count_above = above < 0 ? 0 : h.count[above];
    const double mass_above = above < 0 ? 0 : h.mass[above];
    const float ceiling = above < 0 ? INFINITY : h.floor[above];
    auto* list = static_cast<Candidate*>(
        scratch(kScratchTask, static_cast<size_t>(h.count[depth] - count_above + 1) * sizeof(Candidate)));
    int64_t size = collect(row, h.floor[depth], ceiling, list);
    double total = h.mass[kDepths];
    const int64_t rank = top_k - count_above;
    if (use_k && size >= rank) {
      select_best(list, list + size, rank);
      boundary = list[rank - 1];
      size = rank;
      total = mass_of(row, list, list + size);
    }
    if (use_p && size > 0) boundary = reach_mass(row, list, list + size, top_p * total - mass_above);
  }
  if (min_p > 0.0f) {
    const Candidate floor = {row.best + std::log(min_p) / row.inverse_temperature, static_cast<int32_t>(row.x.n)};
    if (better(floor, boundary)) boundary = floor;
  }
  return boundary;
}

// Inverts the cumulative weight, in id order, at `uniform`.
int32_t draw(const Row& row, Candidate boundary, double uniform, int32_t fallback) {
  const int64_t blocks = (row.x.n + kBlock - 1) / kBlock;
  double* masses = static_cast<double*>(scratch(kScratchTask, static_cast<size_t>(blocks) * sizeof(double)));
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += masses[b] = block_mass(row, b * kBlock, boundary);
  const double target = uniform * total;
  double before = 0;
  int64_t b = 0;
  while (b + 1 < blocks && before + masses[b] <= target) before += masses[b++];
  int32_t chosen = fallback;
  const int64_t end = std::min(row.x.n, (b + 1) * kBlock);
  for (int64_t i = b * kBlock; i < end; i += 16) {
    int count;
    const Floats16 logits = row.x.at(i, &count);
    alignas(64) float weights[16];
    store(weights, select(kept_lanes(logits, i, boundary), row.weight(logits), zero()));
    for (int lane = 0; lane < count; ++lane) {
      if (!(weights[lane] > 0)) continue;
      chosen = static_cast<int32_t>(i + lane);
      before += weights[lane];
      if (before > target) return chosen;
    }
  }
  return chosen;  // rounding can put the target just behind the last weight
}

}  // namespace

void sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k,
            const float* top_p, const float* min_p, const double* uniform, const uint32_t* const* allowed, int32_t* out,
            float* cutoff_logits, int32_t* cutoff_ids) {
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Logits x = {logits + r * vocab, vocab, allowed == nullptr ? nullptr : allowed[r]};
      const Candidate best = argmax(x);
      out[r] = best.id;
      Candidate cutoff = {-INFINITY, static_cast<int32_t>(vocab)};
      const float inverse = 1.0f / temperature[r];  // infinite for 0 and for numbers close to 0
      if (best.id >= 0 && std::isfinite(inverse)) {
        const Row row = {x, best.logit, inverse};
        cutoff = find_boundary(row, top_k[r], top_p[r], min_p[r]);
        out[r] = draw(row, cutoff, uniform[r], best.id);
      } else if (best.id >= 0 && temperature[r] > 0) {
        cutoff = best;
      }
      if (cutoff_logits != nullptr) {
        cutoff_logits[r] = cutoff.logit;
        cutoff_ids[r] = cutoff.id;
      }
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
