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

// Returns the keys, in whole blocks of 64, that sequences s and s + 1 have in common: 0 if one of them sees none of
// these any more.
int32_t shared_keys(const AttentionArgs& a, int64_t s) {
  if (s + 1 >= a.sequences) return 0;
  const int32_t *mine = a.tables + s * a.table_width, *other = mine + a.table_width;
  const int64_t both = std::min(a.starts[s], a.starts[s + 1]), blocks = both / a.cache->block_size;
  int64_t same = 0;
  while (same < blocks && mine[same] == other[same]) ++same;
  const int64_t keys = same * a.cache->block_size / kKeyBlock * kKeyBlock;
  return first_block(a, std::max(a.starts[s], a.starts[s + 1])) < keys ? static_cast<int32_t>(keys) : 0;
}

// Neighbouring sequences [begin, end) and the keys that they share: 0 for a single one.
struct Group {
  int64_t begin, end;
  int32_t shared;
};

// Finds the group that begins with s. common[i]: the keys that i and i + 1 share, 0 for the last.
Group find_group(const int32_t* common, int64_t sequences, int64_t s) {
  const int32_t shared = common[s];
  // If the next sequence shares more with its successor, the better group begins there.
  if (shared == 0 || (s + 1 < sequences && common[s + 1] > shared)) return {s, s + 1, 0};
  int64_t end = s + 2;
  while (common[end - 1] >= shared) ++end;
  return {s, end, shared};
}

// The rows of a group are cut into pieces of at most kQueryRows: several whole sequences, or a part of one. Returns the
// piece that begins with a row of a sequence, as a task of the first kv head and all partitions. size: rows of a token.
Task piece_at(const AttentionArgs& a, const Group& group, int64_t size, int64_t sequence, int64_t first_row) {
  int64_t rows = tokens_of(a, sequence) * size - first_row, members = 1;
  while (sequence + members < group.end && first_row == 0) {
    const int64_t more = rows + tokens_of(a, sequence + members) * size;
    if (more > kQueryRows) break;
    rows = more;
    ++members;
  }
  Task task = {};
  task.sequence = static_cast<int32_t>(sequence);
  task.first_row = static_cast<int32_t>(first_row);
  task.rows = static_cast<int32_t>(std::min(kQueryRows, rows));
  task.members = static_cast<int32_t>(members);
  task.shared = members > 1 ? group.shared : 0;
  for (int64_t i = 0; i < members - 1; ++i)
    task.keys = std::max(task.keys, a.positions[a.cu_tokens[sequence + i + 1] - 1] + 1);
  task.keys = std::max(task.keys, a.positions[token_of(a, task, task.rows - 1)] + 1);
  int64_t earliest = a.starts[sequence] + first_row / size;
  for (int64_t i = 1; i < members; ++i) earliest = std::min<int64_t>(earliest, a.starts[sequence + i]);
  task.first_key = static_cast<int32_t>(first_block(a, earliest));
  task.partition = kAllPartitions;
  return task;
}

// Calls body(task) for each piece of the group.
template <typename Body>
void for_pieces(const AttentionArgs& a, const Group& group, Body&& body) {
  const int64_t size = group_size(a);
  for (int64_t s = group.begin, row = 0; s < group.end;) {
    const Task task = piece_at(a, group, size, s, row);
    body(task);
    row += task.rows;
    if (task.members == 1 && row < tokens_of(a, s) * size) continue;
    s += task.members;
    row = 0;
  }
}

}  // namespace

Tasks make_tasks(const AttentionArgs& a) {
  const int64_t heads = a.cache->kv_heads;
  int64_t room = 0, all_keys = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t tokens = tokens_of(a, s), keys = a.starts[s] + tokens;
    const int64_t tasks = (tokens * group_size(a) + kQueryRows - 1) / kQueryRows * heads;
    room += tasks * partitions(keys);
    all_keys += tasks * (keys - first_block(a, a.starts[s]));
  }
  const size_t list_bytes = static_cast<size_t>(room) * sizeof(Task);
  char* memory = static_cast<char*>(scratch(kScratchTasks, list_bytes + static_cast<size_t>(a.sequences) * 4));
  Task* list = reinterpret_cast<Task*>(memory);
  int32_t* common = reinterpret_cast<int32_t*>(memory + list_bytes);
  for (int64_t s = 0; s < a.sequences; ++s) common[s] = shared_keys(a, s);
  Task* next = list;
  int64_t partials = 0;  // rows of partial results
  for (int64_t s = 0; s < a.sequences;) {
    const Group group = find_group(common, a.sequences, s);
    s = group.end;
    int64_t most = 1;  // partitions of a piece that may be split
    bool full = true;  // whether each task has all kv heads
    for_pieces(a, group, [&](const Task& piece) {
      const int64_t keys = piece.keys - piece.first_key, least = std::min<int64_t>(keys, kPartition);
      full = full && piece.rows * heads <= kQueryRows && least * heads <= all_keys / kFullShares;
      if (keys * heads > all_keys / kFairShares) most = std::max(most, partitions_of(piece));
    });
    const int64_t together = full ? heads : 1;
    int64_t end = partials;
    for (int64_t partition = 0; partition < most; ++partition) {
      end = partials;
      for_pieces(a, group, [&](Task task) {
        task.kv_heads = static_cast<int32_t>(together);
        const bool large = (task.keys - task.first_key) * together > all_keys / kFairShares;
        const int64_t parts = large ? partitions_of(task) : 1;
        const bool split = parts > 1;
        for (int64_t head = 0; head < heads; head += together) {
          task.kv_head = static_cast<int32_t>(head);
          if (split) {
            task.partition = static_cast<int32_t>(first_partition(task) + partition);
            task.partial = static_cast<int32_t>(end + partition * partial_rows(task));
            end += parts * partial_rows(task);
          }
          if (partition < parts) *next++ = task;
        }
      });
    }
    partials = end;
  }
  if (partials == 0) return {list, next - list, {}};
  const size_t partial_bytes = static_cast<size_t>(state_floats(partials, a.cache->dim_padded)) * 4;
  return {list, next - list, state_in(static_cast<float*>(scratch(kScratchPartial, partial_bytes)), partials)};
}

}  // namespace fd
