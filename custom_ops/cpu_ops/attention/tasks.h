// Attention cut into tasks: which rows of which sequences read which keys together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace fd {

// Keys are taken in blocks of 64 from position 0 for every query: the softmax of a row is updated in the same order in
// a decode step and for every cut of a prompt into chunks. Keys behind the position of a row add exact zeros.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kUnit = 16;  // keys that lie together in the cache
// Query rows of one task: (token, head of the group) pairs that share the keys and values of a kv head. The more
// rows, the fewer times the keys of a long prompt are read.
constexpr int64_t kQueryRows = 128;

// Keys of a partition; the first begins at position 0. The result of a row is that of its first partition, merged with
// those of the others in order. Each partition is computed on its own, so one task for all of them gives the same bits
// as one task each.
constexpr int64_t kPartition = 1024;
static_assert(kPartition % kKeyBlock == 0, "no block of keys straddles two partitions");
constexpr int32_t kAllPartitions = -1;

// With a window, a task begins with the first block of 64 keys of which one of its rows sees a key. A block of which a
// row sees no key leaves its sums as they are, to the bit. So the bits of a row do not depend on where its task begins.
//
// If `members` is above 1, the task has all rows of so many neighbouring sequences, whose first `shared` keys are the
// same blocks of the cache (choices that share a prompt). The task reads these keys only once.
// A task with several kv heads reads them block by block: they lie side by side in the cache. It has `rows` for each.
struct Task {
  int32_t sequence, kv_head, kv_heads, first_row, rows, members, shared;
  int32_t first_key;  // where its first block of keys begins
  int32_t keys;       // where the keys that its rows see end
  int32_t partition;  // number of the partition, or kAllPartitions
  int32_t partial;    // unless kAllPartitions: its first row in the partial results, kv head by kv head; partitions of
                      // the same rows follow each other there
};

// The softmax of each row over the keys so far: the best score, the sum of weights relative to it, and the weighted sum
// of the values [Dp]. Rows are allocated in whole vectors of 16.
struct SoftmaxState {
  float *best, *mass, *out;

  SoftmaxState from(int64_t row, int64_t padded) const { return {best + row, mass + row, out + row * padded}; }
};

static inline int64_t state_floats(int64_t rows, int64_t padded) { return rows * (2 + padded); }

static inline SoftmaxState state_in(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

// Tasks that read the same keys are neighbours in the list: a thread runs them one after the other, and the later ones
// find the keys in its cache.
struct Tasks {
  Task* list;
  int64_t count;
  SoftmaxState partials;  // of the tasks of one partition; null if there are none
};

// In scratch of the calling thread.
Tasks make_tasks(const AttentionArgs& a);

static inline int64_t group_size(const AttentionArgs& a) { return a.heads / a.cache->kv_heads; }

// Rows of the query array [kv head][token * group + head of the group][Dp]: the rows of a task are contiguous.
static inline int64_t query_rows(const AttentionArgs& a) { return a.tokens * group_size(a); }

static inline int64_t tokens_of(const AttentionArgs& a, int64_t sequence) {
  return a.cu_tokens[sequence + 1] - a.cu_tokens[sequence];
}

// Returns the first key that a row at this position sees.
static inline int64_t first_seen(const AttentionSpec& a, int64_t position) {
  return a.window == 0 ? 0 : std::max<int64_t>(0, position - a.window + 1);
}

// Returns the beginning of the block of that key.
static inline int64_t first_block(const AttentionSpec& a, int64_t position) {
  return first_seen(a, position) / kKeyBlock * kKeyBlock;
}

static inline int64_t partitions(int64_t keys) { return (keys + kPartition - 1) / kPartition; }

// Returns the end of the partition of `key`.
static inline int64_t partition_end(int64_t key) { return (key / kPartition + 1) * kPartition; }

static inline int64_t first_partition(const Task& task) { return task.first_key / kPartition; }

// Returns the number of partitions of which the task reads keys.
static inline int64_t partitions_of(const Task& task) { return partitions(task.keys) - first_partition(task); }

// Rows of the result of one partition of the task.
static inline int64_t partial_rows(const Task& task) { return (task.rows * task.kv_heads + 15) / 16 * 16; }

// Returns the token of the r-th row of a task. Rows are (token, head of the group) pairs in order, over all members.
static inline int64_t token_of(const AttentionArgs& a, const Task& task, int64_t r) {
  return a.cu_tokens[task.sequence] + (task.first_row + r) / group_size(a);
}

}  // namespace fd
