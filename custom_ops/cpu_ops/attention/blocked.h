// Attention over the paged cache, in blocks of 64 keys: scores, online softmax, weighted sum of the values. It is
// written once, for all instruction sets. What differs is a class Products:
//
//   Element, Left                types of the cache, and of queries and probabilities
//   prepare(a, query)            writes keys and values of the step to the cache, and the queries as Left
//   power_of_2, store_weights    the weights of a row, and their rounding to Left
//   Mode                         a state of the thread, which lasts as long as the object
//   enter(block)                 comes before score and add_values of a block, for all groups of rows
//   score(...)                   scores = queries x keys
//   add_values(...)              sums = sums * shrink + probabilities x values
//
// Rounding. A score is the sum over the dims in order, in float32. The weights 2^(score * scale * log2(e) - best) are
// summed in float32, before they are rounded to Left. The sums of the blocks before are rounded when they are
// multiplied with shrink; then the values are added to them in the order of the keys, in pairs. All of this is done for
// each row alone, so its bits do not depend on the rows beside it.
// All functions are static: simd.h gives the reason.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/key_blocks.h"
#include "attention/merge.h"
#include "attention/tasks.h"
#include "attention/values_of_keys.h"
#include "kernels.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

// A block of keys is multiplied with so many rows of a task at a time: their scores stay in the first cache.
constexpr int64_t kRowsAtOnce = 32;
static_assert(kQueryRows % kRowsAtOnce == 0, "");

// What one thread needs to compute tasks.
template <typename Products>
class Worker {
 public:
  using Element = typename Products::Element;
  using Left = typename Products::Left;

  Worker(const AttentionArgs& a, const Left* queries)
      : a_(a), queries_(queries), padded_(a.cache->dim_padded), work_(workspace(padded_)), products_(padded_) {}

  // next: the task that this thread is likely to run next, whose first keys are fetched at the end of this one.
  void run(const Task& task, const Task& next, const SoftmaxState& partials) {
    if (task.partition != kAllPartitions) {
      attend_afresh(task, first_key(task), next, partials.from(task.partial, padded_));
      return;
    }
    attend_afresh(task, task.first_key, next, work_.first);
    for (int64_t begin = partition_end(task.first_key); begin < task.keys; begin += kPartition) {
      attend_afresh(task, begin, next, work_.later);
      merge(a_, task, begin, work_.later, work_.first);
    }
    write_out(a_, task, work_.first);
  }

 private:
  struct alignas(64) Workspace {
    float scores[kRowsAtOnce * kKeyBlock];
    Left probabilities[kRowsAtOnce * kKeyBlock];
    float shrink[kRowsAtOnce];
    float of_rows[16 * 16];             // a vector of each of 16 rows
    int64_t positions[kQueryRows];      // of the rows of one kv head
    Element* values;                    // [units][16][Dp]: of a unit that the sequence does not fill, or made of keys
    SoftmaxState first, later, member;  // of the task's first and later partitions; of one of its members
  };

  // Rows of the sequence of a span: `count` of each kv head. They see its keys before `visible`.
  struct Rows {
    Span span;  // to the end of what is read of the sequence, perhaps by later calls
    int64_t visible;
    int64_t kv_heads;
    const Left* query;     // of the first kv head
    int64_t first, count;  // the first is the first-th row of the sequence
  };

  // Up to kRowsAtOnce neighbouring rows. One of them sees keys of [begin, end), and all see keys of [all_from,
  // all_see).
  struct RowGroup {
    int64_t first, count, begin, end, all_from, all_see;
  };

  static Workspace& workspace(int64_t padded) {
    const int64_t head = round_up(sizeof(Workspace), 64) / 4, state = state_floats(kQueryRows, padded);
    const int64_t values = kKeyBlock * padded;
    const size_t floats = static_cast<size_t>(head + values + 3 * state);
    float* memory = static_cast<float*>(scratch(kScratchTask, floats * 4));
    auto* work = reinterpret_cast<Workspace*>(memory);
    float* states = memory + head + values;
    work->values = reinterpret_cast<Element*>(memory + head);
    work->first = state_in(states, kQueryRows);
    work->later = state_in(states + state, kQueryRows);
    work->member = state_in(states + 2 * state, kQueryRows);
    return *work;
  }

  static int64_t first_key(const Task& task) {
    return task.partition == kAllPartitions ? task.first_key
                                            : std::max<int64_t>(task.first_key, task.partition * kPartition);
  }

  // Returns the keys that member i of a task reads from `begin` on.
  Span span_of(const Task& task, int64_t i, int64_t begin) const {
    const int64_t s = task.sequence + i, keys = task.members == 1 ? task.keys : a_.starts[s] + tokens_of(a_, s);
    return {s, task.kv_head, begin, task.partition == kAllPartitions ? keys : std::min(keys, partition_end(begin))};
  }

  // The same without keys that none of its rows sees.
  Span own_span(const Task& task, int64_t i, int64_t begin) const {
    return span_of(task, i, std::max(begin, first_block(a_, a_.starts[task.sequence + i])));
  }

  void attend_afresh(const Task& task, int64_t begin, const Task& next, const SoftmaxState& state) {
    const int64_t rows = task.rows * task.kv_heads;
    // Not -infinity: a block of which a row sees no key would give NaN.
    std::fill_n(state.best, rows, std::numeric_limits<float>::lowest());
    std::fill_n(state.mass, rows, 0.0f);
    std::memset(state.out, 0, static_cast<size_t>(rows * padded_) * 4);
    attend_task(task, begin, next, state);
  }

  // Computes the keys of the partition from `begin` on.
  void attend_task(const Task& task, int64_t begin, const Task& next, const SoftmaxState& state) {
    const int64_t group = group_size(a_), first = a_.cu_tokens[task.sequence] * group + task.first_row;
    const int64_t end = partition_end(begin), alone = std::max<int64_t>(begin, task.shared);
    const Left* query = queries_ + (task.kv_head * query_rows(a_) + first) * padded_;
    const Span after = span_of(next, 0, first_key(next));
    const int64_t keys = task.members == 1 ? task.keys : task.shared;
    attend({span_of(task, 0, begin), std::min(keys, end), task.kv_heads, query, task.first_row, task.rows}, after,
           state);
    if (task.members == 1 || alone >= end) return;
    int64_t row = 0;
    for (int64_t i = 0; i < task.members; ++i) {  // each member continues from the state of the shared keys
      const int64_t rows = tokens_of(a_, task.sequence + i) * group;
      const Span own = own_span(task, i, alone);
      for (int64_t h = 0; h < task.kv_heads; ++h)
        copy_state(state.from(h * task.rows + row, padded_), rows, work_.member.from(h * rows, padded_));
      attend({own, std::min(own.end, end), task.kv_heads, query + row * padded_, 0, rows},
             i + 1 < task.members ? own_span(task, i + 1, alone) : after, work_.member);
      for (int64_t h = 0; h < task.kv_heads; ++h)
        copy_state(work_.member.from(h * rows, padded_), rows, state.from(h * task.rows + row, padded_));
      row += rows;
    }
  }

  void copy_state(const SoftmaxState& from, int64_t rows, const SoftmaxState& to) const {
    std::memcpy(to.best, from.best, static_cast<size_t>(rows) * 4);
    std::memcpy(to.mass, from.mass, static_cast<size_t>(rows) * 4);
    std::memcpy(to.out, from.out, static_cast<size_t>(rows * padded_) * 4);
  }

  // Finds the positions of rows: the r-th may be one of a sequence behind that of the span, which shares its keys.
  void find_positions(const Rows& rows) {
    const int64_t size = group_size(a_);
    const int32_t* position = a_.positions + a_.cu_tokens[rows.span.sequence] + rows.first / size;
    for (int64_t r = 0, head = rows.first % size; r < rows.count; ++r) {
      work_.positions[r] = *position;
      if (++head < size) continue;
      head = 0;
      ++position;
    }
  }

  RowGroup group_at(const Rows& rows, int64_t first) const {
    RowGroup group = {first, std::min(kRowsAtOnce, rows.count - first), rows.visible, 0, 0, rows.visible};
    for (int64_t r = first; r < first + group.count; ++r) {
      const int64_t position = work_.positions[r], from = first_seen(a_, position);
      group.begin = std::min(group.begin, from);
      group.all_from = std::max(group.all_from, from);
      group.end = std::max(group.end, position + 1);
      group.all_see = std::min(group.all_see, position + 1);
    }
    group.end = std::min(group.end, rows.visible);
    return group;
  }

  // Adds the keys to `state`, and fetches the first of `then` at the end of the span. A row that sees no key keeps its
  // state.
  void attend(const Rows& rows, const Span& then, const SoftmaxState& state) {
    if (rows.span.begin >= rows.visible) return;
    [[maybe_unused]] const typename Products::Mode mode;
    const Cache& cache = *a_.cache;
    const int64_t heads = rows.kv_heads, head_size = cache.block_size * padded_;
    const bool from_keys = cache.parts == 1;  // the values
    const int64_t to_values = from_keys ? 0 : cache.block_elements;
    find_positions(rows);
    RowGroup groups[kQueryRows / kRowsAtOnce];
    int64_t count = 0;
    for (int64_t first = 0; first < rows.count; first += kRowsAtOnce) groups[count++] = group_at(rows, first);
    Units<Element> here(a_, rows.span, then), ahead = here;
    ahead.next();
    Units<Element> beyond = ahead;
    if (kFetchBeyond) beyond.next();
    for (int64_t key = rows.span.begin; key < rows.visible; key += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, rows.visible - key), units = (keys + kUnit - 1) / kUnit;
      Places places = {heads, head_size, to_values};
      for (int64_t h = 0; h < heads; ++h) {
        KeyBlock<Element> block;
        block.units = units;
        for (int64_t u = 0; u < units; ++u) {
          block.keys[u] = here.keys[u] + h * head_size;
          block.values[u] = block.keys[u] + to_values;
          if (!from_keys) continue;
          Element* values = work_.values + u * kUnit * padded_;
          values_of_keys(block.keys[u], padded_, values);
          block.values[u] = values;
        }
        if (!from_keys && keys % kUnit != 0) {
          const Element*& last = block.values[units - 1];
          copy_values(last, padded_, keys % kUnit, work_.values);
          last = work_.values;
        }
        for (int64_t i = 0; i < 2 * kUnits; ++i, places.next()) {
          block.ahead[i] = ahead.keys[places.unit] + places.offset();
          if (kFetchBeyond) block.beyond[i] = beyond.keys[places.unit] + places.offset();
        }
        block.fetch = true;
        products_.enter(block);
        for (int64_t g = 0; g < count; ++g) {
          const RowGroup& group = groups[g];
          if (group.end <= key || group.begin >= key + kKeyBlock) continue;
          block.units = std::min(units, (group.end - key + kUnit - 1) / kUnit);
          products_.score(rows.query + (h * query_rows(a_) + group.first) * padded_, group.count, block, work_.scores);
          if (group.all_see < key + kKeyBlock || key < group.all_from) hide_unseen(group, key, block.units);
          const SoftmaxState of_group = state.from(h * rows.count + group.first, padded_);
          softmax(group.count, block, of_group);
          products_.add_values(work_.probabilities, work_.shrink, group.count, block, of_group.out);
          block.fetch = false;
        }
      }
      here.next();
      ahead.next();
      if (kFetchBeyond) beyond.next();
    }
  }

  // Scores of the block that begins with `key` become -infinity for keys that a row does not see, and for those behind
  // the units.
  void hide_unseen(const RowGroup& group, int64_t key, int64_t units) {
    for (int64_t r = 0; r < group.count; ++r) {
      const int64_t position = work_.positions[group.first + r];
      const int64_t first = first_seen(a_, position) - key, end = std::min(position + 1 - key, units * kUnit);
      for (int64_t u = 0; u < kUnits; ++u) {
        const Mask seen = lanes_before(end - u * kUnit) & ~lanes_before(first - u * kUnit);
        if (seen == 0xffff) continue;
        float* score = work_.scores + r * kKeyBlock + u * kUnit;
        store(score, select(seen, load(score), set1(-INFINITY)));
      }
    }
  }

  static Mask lanes_before(int64_t lane) { return lane <= 0 ? 0 : lane >= kUnit ? 0xffff : (1u << lane) - 1; }

  // Online softmax over one block, in powers of 2, for 16 rows at a time. Rows behind the last are computed, too, and
  // not used.
  void softmax(int64_t rows, const KeyBlock<Element>& block, const SoftmaxState& state) {
    const float scale = a_.scale * kLog2E;
    const Floats16 factor = set1(scale);
    Fetcher<Element> fetcher(block, kWithScores, kWithValues, padded_);
    const int64_t lines = fetcher.lines_of(rows);
    for (int64_t first = 0; first < rows; first += 16) {
      const int64_t count = std::min<int64_t>(16, rows - first);
      for (int64_t i = 0; i < count; ++i) {
        const float* row = work_.scores + (first + i) * kKeyBlock;
        Floats16 top = load(row);
        for (int64_t u = 1; u < kUnits; ++u) top = max(top, load(row + u * kUnit));
        store(work_.of_rows + i * 16, top);
      }
      const Floats16 before = load(state.best + first);
      const Floats16 best = max(mul(reduce_max_rows(work_.of_rows, count), factor), before);  // as before if it is NaN
      const Floats16 shrink = Products::power_of_2(sub(before, best));
      const Floats16 mass = mul(load(state.mass + first), shrink);
      store(work_.shrink + first, shrink);
      store_n(state.best + first, best, static_cast<int>(count));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t r = first + i;
        const float* row = work_.scores + r * kKeyBlock;
        const Floats16 least = set1(-state.best[r]);
        Floats16 weights[kUnits];
        for (int64_t u = 0; u < kUnits; ++u)
          weights[u] = Products::power_of_2(fma(load(row + u * kUnit), factor, least));
        Products::store_weights(weights, work_.probabilities + r * kKeyBlock);
        Floats16 sum = weights[0];
        for (int64_t u = 1; u < kUnits; ++u) sum = add(sum, weights[u]);
        store(work_.of_rows + i * 16, sum);
        fetcher.next(lines);
      }
      store_n(state.mass + first, add(mass, reduce_add_rows(work_.of_rows, count)), static_cast<int>(count));
    }
  }

  const AttentionArgs& a_;
  const Left* queries_;
  const int64_t padded_;
  Workspace& work_;
  Products products_;  // last: AMX has its tiles in use from here on
};

// Attention of one call, on all threads.
template <typename Products>
static inline void run_attention(const AttentionArgs& a) {
  using Left = typename Products::Left;
  const int64_t elements = a.cache->kv_heads * query_rows(a) * a.cache->dim_padded;
  Left* queries = static_cast<Left*>(scratch(kScratchQuery, static_cast<size_t>(elements) * sizeof(Left)));
  Products::prepare(a, queries);
  const Tasks tasks = make_tasks(a);
  parallel_pieces(tasks.count, 1, [&](Pieces& pieces) {
    Worker<Products> worker(a, queries);
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t t = begin; t < end; ++t)
        worker.run(tasks.list[t], tasks.list[std::min(t + 1, tasks.count - 1)], tasks.partials);
  });
  merge_partials(a, tasks);
}

}  // namespace FD_ISA
}  // namespace fd
