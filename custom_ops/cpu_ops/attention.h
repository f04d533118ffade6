// How attention is cut into tasks; shared by the vector and the AMX version. Static for the reason given in simd.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace fd {
namespace FD_ISA {

// Keys are taken in blocks of 64 from position 0, whatever the query: the softmax of a row is updated in the same
// order in a decode step and in any cut of a prefill. Blocks beyond a row's own position add exact zeros.
constexpr int64_t kKeyBlock = 64;
// Query rows of one task: (token, head of the group) pairs that share the keys and values of one kv head.
constexpr int64_t kQueryRows = 32;

struct Task {
  int32_t sequence, kv_head, first_row, rows;
};

// Queries as [kv head][token * group + head of the group][Dp], so that the rows of a task are contiguous; padded so
// that whole 16-row tiles may be read.
static inline int64_t query_rows(const AttentionArgs& a) {
  return a.tokens * (a.heads / a.cache->kv_heads) + kQueryRows;
}

static inline int64_t make_tasks(const AttentionArgs& a, Task** tasks) {
  const int64_t group = a.heads / a.cache->kv_heads;
  int64_t count = 0;
  for (int64_t s = 0; s < a.sequences; ++s)
    count += ((a.cu_tokens[s + 1] - a.cu_tokens[s]) * group + kQueryRows - 1) / kQueryRows * a.cache->kv_heads;
  Task* list = static_cast<Task*>(scratch(kScratchTasks, static_cast<size_t>(count) * sizeof(Task)));
  Task* next = list;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t rows = (a.cu_tokens[s + 1] - a.cu_tokens[s]) * group;
    for (int64_t first = 0; first < rows; first += kQueryRows)
      for (int64_t head = 0; head < a.cache->kv_heads; ++head)
        *next++ = {static_cast<int32_t>(s), static_cast<int32_t>(head), static_cast<int32_t>(first),
                   static_cast<int32_t>(std::min(kQueryRows, rows - first))};
  }
  *tasks = list;
  return count;
}

}  // namespace FD_ISA
}  // namespace fd
