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

// With `members` above 1: one decode row each of so many neighbouring sequences whose first `shared` keys are the same
// ones (a prompt that several samples share lies in the cache once): these keys are gone through together.
struct Task {
  int32_t sequence, kv_head, first_row, rows, members, shared;
};

// Queries as [kv head][token * group + head of the group][Dp], so that the rows of a task are contiguous; padded so
// that whole 16-row tiles may be read.
static inline int64_t query_rows(const AttentionArgs& a) {
  return a.tokens * (a.heads / a.cache->kv_heads) + kQueryRows;
}

// Keys, in whole blocks of 64, that sequences s and s + 1 have in common, if both decode one token.
static inline int32_t shared_keys(const AttentionArgs& a, int64_t s) {
  if (s + 1 >= a.sequences || a.cu_tokens[s + 2] - a.cu_tokens[s] != 2 || a.cu_tokens[s + 1] - a.cu_tokens[s] != 1)
    return 0;
  const int32_t *mine = a.tables + s * a.table_width, *other = mine + a.table_width;
  const int64_t both = std::min(a.starts[s], a.starts[s + 1]), blocks = both / a.cache->block_size;
  int64_t same = 0;
  while (same < blocks && mine[same] == other[same]) ++same;
  return static_cast<int32_t>(same * a.cache->block_size / kKeyBlock * kKeyBlock);
}

// Neighbouring sequences that go through their first keys together; one alone shares none.
struct Neighbours {
  int64_t members;
  int32_t shared;
};

// Those from s on, at most `most`. common[i]: the keys that i and i + 1 share, 0 for the last.
static inline Neighbours find_neighbours(const int32_t* common, int64_t sequences, int64_t s, int64_t most) {
  const int32_t shared = common[s];
  // Where the next one shares more with its own next, the better group begins behind s.
  if (most < 2 || shared == 0 || (s + 1 < sequences && common[s + 1] > shared)) return {1, 0};
  int64_t members = 2;
  while (members < most && common[s + members - 1] >= shared) ++members;
  return {members, shared};
}

// `share`: whether the kernel takes tasks of several members. Both lists lie in one scratch slot.
static inline int64_t make_tasks(const AttentionArgs& a, bool share, Task** tasks) {
  const int64_t group = a.heads / a.cache->kv_heads, most = share ? kQueryRows / group : 1;
  int64_t count = 0;
  for (int64_t s = 0; s < a.sequences; ++s)
    count += ((a.cu_tokens[s + 1] - a.cu_tokens[s]) * group + kQueryRows - 1) / kQueryRows * a.cache->kv_heads;
  const size_t list_bytes = static_cast<size_t>(count) * sizeof(Task);
  char* memory = static_cast<char*>(scratch(kScratchTasks, list_bytes + static_cast<size_t>(a.sequences) * 4));
  Task* list = reinterpret_cast<Task*>(memory);
  int32_t* common = reinterpret_cast<int32_t*>(memory + list_bytes);
  for (int64_t s = 0; s < a.sequences; ++s) common[s] = most > 1 ? shared_keys(a, s) : 0;
  Task* next = list;
  for (int64_t s = 0; s < a.sequences;) {
    const Neighbours together = find_neighbours(common, a.sequences, s, most);
    const int64_t rows = (a.cu_tokens[s + together.members] - a.cu_tokens[s]) * group;
    for (int64_t first = 0; first < rows; first += kQueryRows)
      for (int64_t head = 0; head < a.cache->kv_heads; ++head)
        *next++ = {static_cast<int32_t>(s),
                   static_cast<int32_t>(head),
                   static_cast<int32_t>(first),
                   static_cast<int32_t>(std::min(kQueryRows, rows - first)),
                   static_cast<int32_t>(together.members),
                   together.shared};
    s += together.members;
  }
  *tasks = list;
  return next - list;
}

}  // namespace FD_ISA
}  // namespace fd
