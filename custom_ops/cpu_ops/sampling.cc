// Sampling and log probabilities over the vocabulary, without sorting it. Compiled once per instruction set.
//
// Top-k, top-p and min-p each keep the best tokens down to some (logit, id), where the lowest id comes first among
// equal logits. So each filter moves one boundary, which is found by selection among a few candidates near the maximum.
// Then one pass in the order of ids draws. Logits are compared directly; only sums of weights need exp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

struct Candidate {
  float logit;
  int32_t id;
};

bool better(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

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
Candidate argmax(const Logits& x) {
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

// Sums float weights in double, per block of 16 lanes x 64, so that a vocabulary of any size is exact enough.
constexpr int64_t kBlock = 1024;

// Lanes at or before the boundary.
Mask kept_lanes(Floats16 logits, int64_t i, Candidate boundary) {
  Mask kept = greater(logits, set1(boundary.logit));
  const int64_t before = boundary.id - i + 1;  // among equal logits, ids up to the boundary's count
  if (before > 0) {
    const Mask ids = before >= 16 ? 0xffff : (1u << before) - 1;
    kept |= equal(logits, set1(boundary.logit)) & ids;
  }
  return kept;
}

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

// Rearranges [begin, end) around a pivot, best first, and returns the pivot's place. Median of three: nothing random.
Candidate* partition(Candidate* begin, Candidate* end) {
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
void select_best(Candidate* begin, Candidate* end, int64_t k) {
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

namespace {

// A logit as log probabilities see it: divided by the temperature of its row, after the largest one was subtracted.
// Without a temperature it stays as it is.
struct Scale {
  float best, temperature;
  bool plain;

  Floats16 of(Floats16 logits) const { return plain ? logits : div(sub(logits, set1(best)), set1(temperature)); }
  float of(float logit) const { return plain ? logit : (logit - best) / temperature; }
  float largest() const { return plain ? best : 0.0f; }
};

// The sum of exp(scaled logit - the largest one) of the tokens up to the cutoff, in blocks, which are summed in double.
double scaled_mass(const Logits& x, const Scale& scale, Candidate cutoff) {
  double mass = 0;
  for (int64_t from = 0; from < x.n; from += kBlock) {
    Floats16 sum = zero();
    const int64_t end = std::min(x.n, from + kBlock);
    for (int64_t i = from; i < end; i += 16) {
      int count;
      const Floats16 logits = x.at(i, &count);
      const Floats16 weights = exp(sub(scale.of(logits), set1(scale.largest())));
      sum = add(sum, select(kept_lanes(logits, i, cutoff), weights, zero()));
    }
    mass += reduce_add(sum);
  }
  return mass;
}

int64_t count_greater(const Logits& x, float logit) {
  int64_t found = 0;
  for (int64_t i = 0; i < x.n; i += 16) {
    int count;
    found += __builtin_popcount(greater(x.at(i, &count), set1(logit)));
  }
  return found;
}

// Writes the `top` best tokens up to the cutoff to `list`, best first, without those of probability 0. Returns how many
// there are. The list has room for 2 * top + 16: whenever it is full, only the best of it stay.
int64_t best_tokens(const Logits& x, Candidate cutoff, int64_t top, Candidate* list) {
  int64_t size = 0;
  float floor = -INFINITY;
  for (int64_t i = 0; i < x.n; i += 16) {
    int count;
    const Floats16 logits = x.at(i, &count);
    Mask wanted = greater(logits, set1(floor));
    if (wanted != 0) wanted &= kept_lanes(logits, i, cutoff);
    for (; wanted != 0; wanted &= wanted - 1) {
      const int64_t id = i + __builtin_ctz(wanted);
      list[size++] = {x.x[id], static_cast<int32_t>(id)};
    }
    if (size > 2 * top) {
      select_best(list, list + size, top);
      size = top;
      floor = list[top - 1].logit;  // an equal logit has a higher id, so it comes behind
    }
  }
  if (size > top) select_best(list, list + size, top);
  size = std::min(size, top);
  std::sort(list, list + size, better);
  return size;
}

}  // namespace

void logprobs(const float* logits, int64_t rows, int64_t vocab, const LogprobArgs& a) {
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Logits x = {logits + r * vocab, vocab, nullptr};
      const Candidate best = argmax(x);
      const int64_t first_other = r > 0 && a.other_ends != nullptr ? a.other_ends[r - 1] : 0;
      const int64_t end_other = a.other_ends != nullptr ? a.other_ends[r] : 0;
      float* top_values = a.top_values + r * a.top;
      int32_t* top_ids = a.top_ids + r * a.top;
      std::fill_n(top_values, a.top, -INFINITY);
      std::fill_n(top_ids, a.top, 0);
      if (best.id < 0) {
        a.chosen[r] = NAN;
        a.ranks[r] = 0;
        std::fill(a.other_values + first_other, a.other_values + end_other, -INFINITY);
        continue;
      }
      const bool plain = a.temperature == nullptr;
      const Scale scale = {best.logit, plain ? 1.0f : a.temperature[r], plain};
      Candidate cutoff = {-INFINITY, static_cast<int32_t>(vocab)};
      if (a.cutoff_logits != nullptr) cutoff = {a.cutoff_logits[r], a.cutoff_ids[r]};
      const double log_mass = std::log(scaled_mass(x, scale, cutoff));
      auto logprob = [&](float logit) {
        return static_cast<float>(static_cast<double>(scale.of(logit)) - scale.largest() - log_mass);
      };
      const float chosen = x.x[a.ids[r]];
      a.chosen[r] = logprob(chosen);
      a.ranks[r] = static_cast<int32_t>(1 + count_greater(x, chosen));
      for (int64_t k = first_other; k < end_other; ++k) {
        const Candidate other = {x.x[a.other_ids[k]], a.other_ids[k]};
        a.other_values[k] = better(cutoff, other) ? -INFINITY : logprob(other.logit);
      }
      if (a.top == 0) continue;
      const size_t room = static_cast<size_t>(2 * a.top + 16);
      auto* list = static_cast<Candidate*>(scratch(kScratchTask, room * sizeof(Candidate)));
      const int64_t size = best_tokens(x, cutoff, a.top, list);
      for (int64_t i = 0; i < size; ++i) {
        top_values[i] = logprob(list[i].logit);
        top_ids[i] = list[i].id;
      }
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
