// The end of attention: results of partitions are merged, divided by their mass, and written out.
// All functions are static: simd.h gives the reason.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/tasks.h"
#include "kernels.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

constexpr float kLn2 = 0.69314718f, kLog2E = 1.44269504f;
constexpr int64_t kTasksPerMerge = 64;  // fewer results are merged faster than another thread wakes up

// Merges a later partition, of keys from `begin` on, into the state of those before. Rows that see no key of the
// partition keep their state, and rows that see no key before it get the state of the partition.
static inline void merge(const AttentionArgs& a, const Task& task, int64_t begin, const SoftmaxState& later,
                         const SoftmaxState& state) {
  const int64_t padded = a.cache->dim_padded, rows = task.rows * task.kv_heads;
  for (int64_t r = 0; r < rows; r += 16) {
    const int64_t count = std::min<int64_t>(16, rows - r);
    Mask sees = 0, begins = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = a.positions[token_of(a, task, (r + i) % task.rows)];
      if (position >= begin) sees |= 1u << i;
      if (first_seen(a, position) >= begin) begins |= 1u << i;
    }
    const Floats16 old_best = load(state.best + r), later_best = load(later.best + r), best = max(old_best, later_best);
    const Floats16 shrink = exp(mul(sub(old_best, best), set1(kLn2))),
                   weight = exp(mul(sub(later_best, best), set1(kLn2)));
    const Floats16 old_mass = load(state.mass + r), later_mass = load(later.mass + r);
    const Floats16 mass = select(begins, later_mass, fma(old_mass, shrink, mul(later_mass, weight)));
    store(state.best + r, select(sees, best, old_best));
    store(state.mass + r, select(sees, mass, old_mass));
    alignas(64) float shrinks[16], weights[16];
    store(shrinks, shrink);
    store(weights, weight);
    for (int64_t i = 0; i < count; ++i) {
      if ((sees >> i & 1) == 0) continue;
      float *out = state.out + (r + i) * padded, *added = later.out + (r + i) * padded;
      if ((begins >> i & 1) != 0) {
        std::memcpy(out, added, static_cast<size_t>(padded) * 4);
        continue;
      }
      for (int64_t d = 0; d < padded; d += 16)
        store(out + d, fma(load(out + d), set1(shrinks[i]), mul(load(added + d), set1(weights[i]))));
    }
  }
}

// The sum of the weights of a row, with that of the sink of its head: a score of a key without a value.
static inline float mass_with_sink(const AttentionArgs& a, int64_t head, float best, float mass) {
  if (a.sinks == nullptr) return mass;
  const Floats16 weight = exp2(set1(std::min(126.0f, a.sinks[head] * kLog2E - best)));  // exp2 takes no more than 126
  return mass + reduce_max(weight);
}

static inline void write_out(const AttentionArgs& a, const Task& task, const SoftmaxState& state) {
  const int64_t dim = a.cache->head_dim, group = group_size(a);
  for (int64_t i = 0; i < task.rows * task.kv_heads; ++i) {
    const int64_t r = i % task.rows;
    const int64_t head = (task.kv_head + i / task.rows) * group + (task.first_row + r) % group;
    float* to = a.out + (token_of(a, task, r) * a.heads + head) * dim;
    const Floats16 mass = set1(mass_with_sink(a, head, state.best[i], state.mass[i]));
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = static_cast<int>(std::min<int64_t>(16, dim - d));
      store_n(to + d, div(load(state.out + i * a.cache->dim_padded + d), mass), n);
    }
  }
}

// Merges and writes the results of the tasks that were split, once all tasks have run.
static inline void merge_partials(const AttentionArgs& a, const Tasks& tasks) {
  if (tasks.partials.out == nullptr) return;
  const int64_t padded = a.cache->dim_padded;
  parallel_for(tasks.count, kTasksPerMerge, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Task& task = tasks.list[t];
      if (task.partition != first_partition(task)) continue;
      const SoftmaxState first = tasks.partials.from(task.partial, padded);
      for (int64_t i = 1; i < partitions_of(task); ++i)
        merge(a, task, (task.partition + i) * kPartition, first.from(i * partial_rows(task), padded), first);
      write_out(a, task, first);
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
