#include "attention/tasks.h"

#include <algorithm>

#include "runtime/memory.h"

namespace fd {
namespace {

// A task is split if it has more than 1 / kFairShares of all keys. A smaller task has enough others of its size beside
// it to keep every thread busy.
constexpr int64_t kFairShares = 64;
// A task has all kv heads if it has no more than 1 / kFullShares of all keys then.
constexpr int64_t kFullShares = 16;

// Returns the keys, in whole blocks of 64, that sequences s and s + 1 have in common, if both decode one token.
int32_t shared_keys(const AttentionArgs& a, int64_t s) {
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
Neighbours find_neighbours(const int32_t* common, int64_t sequences, int64_t s, int64_t most) {
  const int32_t shared = common[s];
  // If the next sequence shares more with its successor, the better group begins there.
  if (most < 2 || shared == 0 || (s + 1 < sequences && common[s + 1] > shared)) return {1, 0};
  int64_t members = 2;
  while (members < most && common[s + members - 1] >= shared) ++members;
  return {members, shared};
}

}  // namespace

Tasks make_tasks(const AttentionArgs& a) {
  const int64_t group = group_size(a), most = kQueryRows / group;
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
    for (int64_t first = 0; first < rows; first += kQueryRows) {
      Task task = {};
      task.sequence = static_cast<int32_t>(s);
      task.first_row = static_cast<int32_t>(first);
      task.rows = static_cast<int32_t>(std::min(kQueryRows, rows - first));
      task.members = static_cast<int32_t>(together.members);
      task.shared = together.shared;
      for (int64_t t = token_of(a, task, 0); t <= token_of(a, task, task.rows - 1); ++t)
        task.keys = std::max(task.keys, a.positions[t] + 1);
      const int64_t heads = a.cache->kv_heads, least = std::min<int64_t>(task.keys, kPartition);
      const bool full = task.rows * heads <= kQueryRows && least * heads <= all_keys / kFullShares;
      task.kv_heads = static_cast<int32_t>(full ? heads : 1);
      for (int64_t head = 0; head < heads; head += task.kv_heads) {
        task.kv_head = static_cast<int32_t>(head);
        task.partition = kAllPartitions;
        if (task.keys <= kPartition || task.keys * task.kv_heads <= all_keys / kFairShares) {
          *next++ = task;
          continue;
        }
        for (task.partition = 0; task.partition < partitions(task.keys); ++task.partition) {
          task.partial = static_cast<int32_t>(partial_rows);
          partial_rows += round_up(task.rows * task.kv_heads, 16);
          *next++ = task;
        }
      }
    }
    s += together.members;
  }
  if (partial_rows == 0) return {list, next - list, {}};
  const size_t partial_bytes = static_cast<size_t>(state_floats(partial_rows, a.cache->dim_padded)) * 4;
  return {list, next - list, state_in(static_cast<float*>(scratch(kScratchPartial, partial_bytes)), partial_rows)};
}

}  // namespace fd
