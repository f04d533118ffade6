// Cutting of attention into tasks, and merging of their results; shared by the vector and the AMX version. All
// functions are static: simd.h gives the reason.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

// Keys are taken in blocks of 64 from position 0 for every query: the softmax of a row is updated in the same order in
// a decode step and for every cut of a prompt into chunks. Keys behind the position of a row add exact zeros.
constexpr int64_t kKeyBlock = 64;
// Query rows of one task: (token, head of the group) pairs that share the keys and values of one kv head.
constexpr int64_t kQueryRows = 32;

// Keys of a partition; the first begins at position 0. The result of a row is that of its first partition, merged with
// those of the others in order. Each partition is computed on its own, so one task for all of them gives the same bits
// as one task each.
constexpr int64_t kPartition = 1024;
static_assert(kPartition % kKeyBlock == 0, "no block of keys straddles two partitions");
constexpr int32_t kAllPartitions = -1;
// A task is split if it has more than 1 / kFairShares of all keys. A smaller task has enough others of its size beside
// it to keep every thread busy.
constexpr int64_t kFairShares = 64;
constexpr int64_t kTasksPerMerge = 64;  // fewer results are merged faster than another thread wakes up

// If `members` is above 1, the task has one decode token of each of so many neighbouring sequences, whose first
// `shared` keys are the same blocks of the cache (choices that share a prompt). The task reads these keys only once.
struct Task {
  int32_t sequence, kv_head, first_row, rows, members, shared;
  int32_t keys;       // number of keys that the last of its rows sees
  int32_t partition;  // number of the partition, or kAllPartitions
  int32_t partial;    // unless kAllPartitions: its first row in the partial results
};

// The softmax of each row over the keys so far: the best score, the sum of weights relative to it, and the weighted sum
// of the values [Dp]. Rows are allocated in whole vectors of 16.
struct SoftmaxState {
  float *best, *mass, *out;

  SoftmaxState from(int64_t row, int64_t padded) const { return {best + row, mass + row, out + row * padded}; }
};

struct Tasks {
  Task* list;
  int64_t count;
  SoftmaxState partials;  // of the tasks of one partition; null if there are none
};

// Rows of the query array [kv head][token * group + head of the group][Dp]: the rows of a task are contiguous, and
// padding allows reads of whole 16-row tiles.
static inline int64_t query_rows(const AttentionArgs& a) {
  return a.tokens * (a.heads / a.cache->kv_heads) + kQueryRows;
}

// Returns the keys, in whole blocks of 64, that sequences s and s + 1 have in common, if both decode one token.
static inline int32_t shared_keys(const AttentionArgs& a, int64_t s) {
  if (s + 1 >= a.sequences || a.cu_tokens[s + 2] - a.cu_tokens[s] != 2 || a.cu_tokens[s + 1] - a.cu_tokens[s] != 1)
    return 0;
  const int32_t *mine = a.tables + s * a.table_width, *other = mine + a.table_width;
  const int64_t both = std::min(a.starts[s], a.starts[s + 1]), blocks = both / a.cache->block_size;
  int64_t same = 0;
  while (same < blocks && mine[same] == other[same]) ++same;
  return static_cast<int32_t>(same * a.cache->block_size / kKeyBlock * kKeyBlock);
}

// Neighbouring sequences that are one task for the keys they share; a single sequence has shared = 0.
struct Neighbours {
  int64_t members;
  int32_t shared;
};

// Finds the group that begins with s, at most `most` members. common[i]: the keys that i and i + 1 share, 0 for the
// last.
static inline Neighbours find_neighbours(const int32_t* common, int64_t sequences, int64_t s, int64_t most) {
  const int32_t shared = common[s];
  // If the next sequence shares more with its successor, the better group begins there.
  if (most < 2 || shared == 0 || (s + 1 < sequences && common[s + 1] > shared)) return {1, 0};
  int64_t members = 2;
  while (members < most && common[s + members - 1] >= shared) ++members;
  return {members, shared};
}

static inline int64_t partitions(int64_t keys) { return (keys + kPartition - 1) / kPartition; }

// Returns the end of the partition of `key`.
static inline int64_t partition_end(int64_t key) { return (key / kPartition + 1) * kPartition; }

// Returns the token of the r-th row of a task. Rows are (token, head of the group) pairs in order, over all members.
static inline int64_t token_of(const AttentionArgs& a, const Task& task, int64_t r) {
  return a.cu_tokens[task.sequence] + (task.first_row + r) / (a.heads / a.cache->kv_heads);
}

static inline int64_t state_floats(int64_t rows, int64_t padded) { return rows * (2 + padded); }

static inline SoftmaxState state_in(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

// share: the kernel can compute tasks with several members.
static inline Tasks make_tasks(const AttentionArgs& a, bool share) {
  const int64_t group = a.heads / a.cache->kv_heads, most = share ? kQueryRows / group : 1;
  int64_t room = 0, all_keys = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t tokens = a.cu_tokens[s + 1] - a.cu_tokens[s], keys = a.starts[s] + tokens;
    const int64_t tasks = (tokens * group + kQueryRows - 1) / kQueryRows * a.cache->kv_heads;
    room += tasks * partitions(keys);
    all_keys += tasks * keys;
  }
  const size_t list_bytes = static_cast<size_t>(room) * sizeof(Task);
  char* memory = static_cast<char*>(scratch(kScratchTasks, list_bytes + static_cast<size_t>(a.sequences) * 4));
  Task* list = reinterpret_cast<Task*>(memory);
  int32_t* common = reinterpret_cast<int32_t*>(memory + list_bytes);
  for (int64_t s = 0; s < a.sequences; ++s) common[s] = most > 1 ? shared_keys(a, s) : 0;
  Task* next = list;
  int64_t partial_rows = 0;
  for (int64_t s = 0; s < a.sequences;) {
    const Neighbours together = find_neighbours(common, a.sequences, s, most);
    const int64_t rows = (a.cu_tokens[s + together.members] - a.cu_tokens[s]) * group;
    for (int64_t first = 0; first < rows; first += kQueryRows)
      for (int64_t head = 0; head < a.cache->kv_heads; ++head) {
        Task task = {};
        task.sequence = static_cast<int32_t>(s);
        task.kv_head = static_cast<int32_t>(head);
        task.first_row = static_cast<int32_t>(first);
        task.rows = static_cast<int32_t>(std::min(kQueryRows, rows - first));
        task.members = static_cast<int32_t>(together.members);
        task.shared = together.shared;
        for (int64_t t = token_of(a, task, 0); t <= token_of(a, task, task.rows - 1); ++t)
          task.keys = std::max(task.keys, a.positions[t] + 1);
        task.partition = kAllPartitions;
        if (task.keys <= std::max(kPartition, all_keys / kFairShares)) {
          *next++ = task;
          continue;
        }
        for (task.partition = 0; task.partition < partitions(task.keys); ++task.partition) {
          task.partial = static_cast<int32_t>(partial_rows);
          partial_rows += round_up(task.rows, 16);
          *next++ = task;
        }
      }
    s += together.members;
  }
  if (partial_rows == 0) return {list, next - list, {}};
  const size_t partial_bytes = static_cast<size_t>(state_floats(partial_rows, a.cache->dim_padded)) * 4;
  return {list, next - list, state_in(static_cast<float*>(scratch(kScratchPartial, partial_bytes)), partial_rows)};
}

// Merges a later partition, of keys from `begin` on, into the state of those before. The weights are
// powers of e^log_base. Rows that see no key of the partition keep their state.
static inline void merge(const AttentionArgs& a, const Task& task, int64_t begin, float log_base,
                         const SoftmaxState& later, const SoftmaxState& state) {
  const int64_t padded = a.cache->dim_padded;
  for (int64_t r = 0; r < task.rows; r += 16) {
    const int64_t count = std::min<int64_t>(16, task.rows - r);
    Mask sees = 0;
    for (int64_t i = 0; i < count; ++i)
      if (a.positions[token_of(a, task, r + i)] >= begin) sees |= 1u << i;
    const Floats16 old_best = load(state.best + r), later_best = load(later.best + r), best = max(old_best, later_best);
    const Floats16 shrink = exp(mul(sub(old_best, best), set1(log_base))),
                   weight = exp(mul(sub(later_best, best), set1(log_base)));
    const Floats16 old_mass = load(state.mass + r), mass = fma(old_mass, shrink, mul(load(later.mass + r), weight));
    store(state.best + r, select(sees, best, old_best));
    store(state.mass + r, select(sees, mass, old_mass));
    alignas(64) float shrinks[16], weights[16];
    store(shrinks, shrink);
    store(weights, weight);
    for (int64_t i = 0; i < count; ++i) {
      if ((sees >> i & 1) == 0) continue;
      float *out = state.out + (r + i) * padded, *added = later.out + (r + i) * padded;
      for (int64_t d = 0; d < padded; d += 16)
        store(out + d, fma(load(out + d), set1(shrinks[i]), mul(load(added + d), set1(weights[i]))));
    }
  }
}

static inline void write_out(const AttentionArgs& a, const Task& task, const SoftmaxState& state) {
  const int64_t dim = a.cache->head_dim, group = a.heads / a.cache->kv_heads;
  for (int64_t r = 0; r < task.rows; ++r) {
    const int64_t head = task.kv_head * group + (task.first_row + r) % group;
    float* to = a.out + (token_of(a, task, r) * a.heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = static_cast<int>(std::min<int64_t>(16, dim - d));
      store_n(to + d, div(load(state.out + r * a.cache->dim_padded + d), set1(state.mass[r])), n);
    }
  }
}

// attend(begin, state) must compute the keys of the partition from `begin` on. own: two states of kQueryRows.
template <typename Attend>
static inline void run_task(const AttentionArgs& a, const Task& task, const SoftmaxState& partials,
                            const SoftmaxState* own, float log_base, Attend attend) {
  const int64_t padded = a.cache->dim_padded;
  auto attend_afresh = [&](int64_t begin, const SoftmaxState& state) {
    std::fill_n(state.best, round_up(task.rows, 16), -INFINITY);
    std::fill_n(state.mass, round_up(task.rows, 16), 0.0f);
    std::memset(state.out, 0, static_cast<size_t>(task.rows * padded) * 4);
    attend(begin, state);
  };
  if (task.partition != kAllPartitions) {
    attend_afresh(task.partition * kPartition, partials.from(task.partial, padded));
    return;
  }
  attend_afresh(0, own[0]);
  for (int64_t begin = kPartition; begin < task.keys; begin += kPartition) {
    attend_afresh(begin, own[1]);
    merge(a, task, begin, log_base, own[1], own[0]);
  }
  write_out(a, task, own[0]);
}

// Merges and writes the results of the tasks that were split, once all tasks have run.
static inline void merge_partials(const AttentionArgs& a, const Tasks& tasks, float log_base) {
  if (tasks.partials.out == nullptr) return;
  auto partial = [&](const Task& task) { return tasks.partials.from(task.partial, a.cache->dim_padded); };
  parallel_for(tasks.count, kTasksPerMerge, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const Task& task = tasks.list[t];
      if (task.partition != 0) continue;
      for (int64_t i = 1; i < partitions(task.keys); ++i)
        merge(a, task, i * kPartition, log_base, partial(tasks.list[t + i]), partial(task));
      write_out(a, task, partial(task));
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
