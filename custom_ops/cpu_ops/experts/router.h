// The choice of the experts of one row. It depends on the logits of this row only. All functions are static:
// runtime/simd.h gives the reason.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "experts/experts.h"
#include "runtime/memory.h"
#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kMaxGroups = 64;  // MAX_GROUPS of ops/blocks.py

// A router, and memory for one row: scores and ranks [experts rounded up to 16].
class Router {
 public:
  Router(const RouterSpec& spec, int64_t experts, float* memory)
      : spec_(spec), experts_(experts), scores_(memory), ranks_(memory + round_up(experts, 16)) {}

  static int64_t floats_of(int64_t experts) { return 2 * round_up(experts, 16); }

  // Chooses for a row with these logits, or with `forced` takes the experts that `chosen` has. Writes `chosen` and
  // their weights, [top_k] each. Experts are distinct whatever the logits are; those of a row with a NaN count as the
  // worst.
  void choose(const float* logits, bool forced, uint16_t* chosen, float* weights) {
    score(logits);
    if (!forced) {
      rank(logits);
      for (int64_t i = 0; i < spec_.top_k; ++i) {
        const int64_t best = highest(ranks_, experts_);
        chosen[i] = static_cast<uint16_t>(best);
        ranks_[best] = kTaken;
      }
    }
    weigh(logits, chosen, weights);
  }

 private:
  // Below all other ranks: a number that no rank is. A rank that is not a number is stored as kWorst.
  static constexpr float kTaken = -std::numeric_limits<float>::infinity();
  static constexpr float kWorst = std::numeric_limits<float>::lowest();

  // The highest of `count` values above kTaken, the first of equal ones.
  static int64_t highest(const float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; ++i)
      if (values[i] > values[best]) best = i;
    return best;
  }

  void score(const float* logits) {
    if (spec_.score == kSoftmaxOfChosen) return;
    float peak = logits[0];
    for (int64_t e = 1; e < experts_; ++e) peak = std::max(peak, logits[e]);
    const Floats16 one = set1(1.0f), top = set1(peak);
    for (int64_t e = 0; e < experts_; e += 16) {
      const Floats16 x = load_n(logits + e, static_cast<int>(std::min<int64_t>(16, experts_ - e)));
      store(scores_ + e, spec_.score == kSigmoid ? div(one, add(one, exp(sub(zero(), x)))) : exp(sub(x, top)));
    }
    if (spec_.score == kSigmoid) return;
    float sum = 0;
    for (int64_t e = 0; e < experts_; ++e) sum += scores_[e];
    for (int64_t e = 0; e < experts_; ++e) scores_[e] /= sum;
  }

  void rank(const float* logits) {
    const float* from = spec_.score == kSoftmaxOfChosen ? logits : scores_;
    for (int64_t e = 0; e < experts_; ++e) {
      const float rank = spec_.bias == nullptr ? from[e] : from[e] + spec_.bias[e];
      ranks_[e] = rank > kWorst ? rank : kWorst;
    }
    if (spec_.groups > 1) keep_best_groups();
  }

  void keep_best_groups() {
    const int64_t size = experts_ / spec_.groups;
    float sums[kMaxGroups];
    for (int64_t g = 0; g < spec_.groups; ++g) {
      const float* ranks = ranks_ + g * size;
      float first = kWorst, second = kWorst;
      for (int64_t e = 0; e < size; ++e) {
        if (ranks[e] > first) {
          second = first;
          first = ranks[e];
        } else if (ranks[e] > second) {
          second = ranks[e];
        }
      }
      sums[g] = size > 1 ? std::max(first + second, kWorst) : first;
    }
    bool kept[kMaxGroups] = {};
    for (int64_t i = 0; i < spec_.top_groups; ++i) {
      const int64_t best = highest(sums, spec_.groups);
      kept[best] = true;
      sums[best] = kTaken;
    }
    for (int64_t g = 0; g < spec_.groups; ++g)
      if (!kept[g]) std::fill_n(ranks_ + g * size, size, kTaken);
  }

  void weigh(const float* logits, const uint16_t* chosen, float* weights) {
    const int64_t k = spec_.top_k;
    if (spec_.score == kSoftmaxOfChosen) {
      float peak = logits[chosen[0]];
      for (int64_t i = 1; i < k; ++i) peak = std::max(peak, logits[chosen[i]]);
      for (int64_t i = 0; i < k; ++i) weights[i] = exp_of(logits[chosen[i]] - peak);
    } else {
      for (int64_t i = 0; i < k; ++i) weights[i] = scores_[chosen[i]];
    }
    if (spec_.normalize || spec_.score == kSoftmaxOfChosen) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += weights[i];
      for (int64_t i = 0; i < k; ++i) weights[i] /= std::max(sum, spec_.norm_min);
    }
    for (int64_t i = 0; i < k; ++i) weights[i] *= spec_.scale;
  }

  static float exp_of(float x) {
    float all[16];
    store(all, exp(set1(x)));
    return all[0];
  }

  const RouterSpec& spec_;
  const int64_t experts_;
  float *const scores_, *const ranks_;
};

}  // namespace FD_ISA
}  // namespace fd
