// Log probabilities of tokens, the rank of one, and the best tokens of a row. Compiled once per instruction set.
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
