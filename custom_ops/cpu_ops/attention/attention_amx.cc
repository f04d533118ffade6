// Attention over a bfloat16 cache on AMX tiles: scores = q @ k.T and p @ v, both with bfloat16 operands and float32
// accumulators; the softmax in between on vectors. The cache holds keys and values in the order of right tiles
// (kernels.h), so nothing is rearranged here, in decode or in prefill.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "attention/attention.h"
#include "runtime/amx_tiles.h"
#include "runtime/approximate_math.h"
#include "runtime/simd.h"

namespace fd {
namespace amx {
namespace {

// Rows of an input tile, always 16. If a task has fewer, the other rows hold whatever lies behind its queries. A row of
// the result depends on its own row of the input only.
constexpr int64_t kTileRows = 16;
constexpr bool kSharesKeys = true;       // a tile has room for the rows of several sequences
constexpr float kLogBase = 0.69314718f;  // scores are powers of 2

// Memory of one task: scores and products of 32 rows, their probabilities as bfloat16 input tiles.
struct alignas(64) Workspace {
  float scores[kQueryRows * kKeyBlock];
  uint16_t probabilities[kQueryRows * kKeyBlock];
  float shrink[kQueryRows];
  float* product;          // [32][Dp]
  uint16_t* values;        // [2][16][Dp][2], for groups of 32 keys that cannot be read in place
  SoftmaxState states[2];  // for run_task
  SoftmaxState own;        // of one member of a task
};

// scores[32][64] for `units` x 16 keys.
void score_block(const uint16_t* query, int64_t padded, const uint16_t* const* keys, int64_t units, bool two,
                 float* scores) {
  for (int64_t u = 0; u < units; u += 2) {
    const bool pair = u + 1 < units;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < padded; d += 32) {
      _tile_loadd(4, query + d, padded * 2);
      _tile_loadd(6, keys[u] + d * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      if (pair) {
        _tile_loadd(7, keys[u + 1] + d * 16, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (two) {
        _tile_loadd(5, query + 16 * padded + d, padded * 2);
        _tile_dpbf16ps(2, 5, 6);
        if (pair) _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* to = scores + u * 16;
    _tile_stored(0, to, kKeyBlock * 4);
    if (pair) _tile_stored(1, to + 16, kKeyBlock * 4);
    if (two) {
      _tile_stored(2, to + 16 * kKeyBlock, kKeyBlock * 4);
      if (pair) _tile_stored(3, to + 16 * kKeyBlock + 16, kKeyBlock * 4);
    }
  }
}

// product[32][Dp] = probabilities[32][32 * groups] @ values.
void weigh_values(const uint16_t* probabilities, const uint16_t* const* values, int64_t groups, int64_t padded,
                  bool two, float* product) {
  for (int64_t d = 0; d < padded; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t g = 0; g < groups; ++g) {
      _tile_loadd(4, probabilities + g * 32, kKeyBlock * 2);
      _tile_loadd(6, values[g] + d * 2, padded * 4);
      _tile_loadd(7, values[g] + d * 2 + 32, padded * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, probabilities + 16 * kKeyBlock + g * 32, kKeyBlock * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, product + d, padded * 4);
    _tile_stored(1, product + d + 16, padded * 4);
    if (two) {
      _tile_stored(2, product + 16 * padded + d, padded * 4);
      _tile_stored(3, product + 16 * padded + d + 16, padded * 4);
    }
  }
}

// 2^x for x <= 0; exactly 0 below -126; NaN stays NaN.
inline __m512 exp2_or_zero(__m512 x, __mmask16 wanted) {
  return approximate_exp2(x, _mm512_mask_cmp_ps_mask(wanted, x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ));
}

// Online softmax over one key block, in powers of 2. Row r sees the first start + (first_row + r) / group + 1 of its
// keys. `start` is relative to the block, and may be negative. `scale` includes log2(e).
void softmax_block(Workspace& work, const SoftmaxState& state, int rows, int64_t units, int64_t start, int64_t group,
                   int64_t first_row, float scale) {
  const __m512 factor = _mm512_set1_ps(scale), lowest = _mm512_set1_ps(-INFINITY);
  alignas(64) float best[kQueryRows] = {};
  __mmask16 seen[kQueryRows][kKeyBlock / 16];
  for (int r = 0; r < rows; ++r) {
    const int64_t visible = start + (first_row + r) / group + 1;
    __m512 top = lowest;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t left = visible - u * 16;
      seen[r][u] = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0;
      top = _mm512_mask_max_ps(top, seen[r][u], top, _mm512_load_ps(work.scores + r * kKeyBlock + u * 16));
    }
    best[r] = std::max(state.best[r], reduce_max({top}) * scale);
  }
  for (int r = 0; r < rows; r += 16) {  // whole vectors; the results of rows behind the last are not used
    const __m512 fresh = _mm512_load_ps(best + r);
    _mm512_store_ps(work.shrink + r, exp2_or_zero(_mm512_sub_ps(_mm512_load_ps(state.best + r), fresh), 0xffff));
    _mm512_store_ps(state.best + r, fresh);
    _mm512_store_ps(state.mass + r, _mm512_mul_ps(_mm512_load_ps(state.mass + r), _mm512_load_ps(work.shrink + r)));
  }
  for (int r = 0; r < rows; ++r) {
    const __m512 peak = _mm512_set1_ps(best[r]);
    __m512 p[kKeyBlock / 16], sum = _mm512_setzero_ps();
    for (int64_t u = 0; u < kKeyBlock / 16; ++u) {
      p[u] = _mm512_setzero_ps();
      if (u >= units) continue;
      const __m512 s = _mm512_load_ps(work.scores + r * kKeyBlock + u * 16);
      p[u] = exp2_or_zero(_mm512_fmsub_ps(s, factor, peak), seen[r][u]);
      sum = _mm512_add_ps(sum, p[u]);
    }
    for (int64_t u = 0; u < kKeyBlock / 16; u += 2)
      _mm512_store_si512(work.probabilities + r * kKeyBlock + u * 16, (__m512i)_mm512_cvtne2ps_pbh(p[u + 1], p[u]));
    state.mass[r] += reduce_add({sum});
  }
}

inline void prefetch(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(data) + i, _MM_HINT_T1);
}

// Copies the values of 16 keys and zeroes slots from `count` on: these may hold values of an earlier request, and
// 0 x infinity is NaN.
void copy_values(const uint16_t* from, int64_t padded, int64_t count, uint16_t* to) {
  if (count < 16) std::memset(to, 0, static_cast<size_t>(16 * padded) * 2);
  if (count == 0) return;
  std::memcpy(to, from, static_cast<size_t>(count / 2 * 2 * padded) * 2);
  if (count % 2 == 0) return;
  const uint16_t* last = from + count / 2 * 2 * padded;
  for (int64_t d = 0; d < padded; ++d) to[count / 2 * 2 * padded + d * 2] = last[d * 2];
}

// Computes keys [begin, keys) of a sequence within the partition of `begin`, for `rows` queries from the first_row-th
// row of the sequence on. begin is a multiple of 64. The results are added to `state`; a row that sees no key at all
// becomes NaN.
void attend(const AttentionArgs& a, int64_t sequence, int64_t kv_head, const uint16_t* query, int64_t first_row,
            int rows, int64_t begin, int64_t keys, const SoftmaxState& state, Workspace& work) {
  const Cache& cache = *a.cache;
  const int64_t padded = cache.dim_padded, group = a.heads / cache.kv_heads, start = a.starts[sequence];
  const int32_t* table = a.tables + sequence * a.table_width;
  const uint16_t* data = static_cast<const uint16_t*>(cache.data);
  const int64_t head_offset = kv_head * cache.block_size * padded;
  const int64_t limit = std::min(keys, partition_end(begin));
  const bool two = rows > 16;
  for (int64_t key0 = begin; key0 < limit; key0 += kKeyBlock) {
    const int64_t here = std::min(kKeyBlock, limit - key0);
    const int64_t units = (here + 15) / 16, groups = (here + 31) / 32;
    const uint16_t *key_units[kKeyBlock / 16], *values[kKeyBlock / 32];
    for (int64_t u = 0; u < units; ++u) {
      const int64_t key = key0 + u * 16;
      key_units[u] = data + cache.offset(a.layer, 0, table[key / cache.block_size]) + head_offset +
                     key % cache.block_size * padded;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t key = key0 + g * 32;
      auto values_at = [&](int64_t position) {
        return data + cache.offset(a.layer, 1, table[position / cache.block_size]) + head_offset +
               position % cache.block_size * padded;
      };
      if (limit - key >= 32 && key % cache.block_size + 32 <= cache.block_size) {
        values[g] = values_at(key);
        continue;
      }
      // The end of the sequence, or a group that lies in two blocks of 16.
      uint16_t* copy = work.values + g * 32 * padded;
      for (int64_t half = 0; half < 32; half += 16) {
        const int64_t count = std::clamp<int64_t>(limit - key - half, 0, 16);
        copy_values(count > 0 ? values_at(key + half) : nullptr, padded, count, copy + half * padded);
      }
      values[g] = copy;
    }
    // Decode reads keys and values from memory: fetch those of the next block now. Behind the last block of the
    // partition they belong to the next task, most likely of the same thread.
    for (int64_t key = key0 + kKeyBlock; key < std::min(keys, key0 + 2 * kKeyBlock); key += 16) {
      const int64_t at = head_offset + key % cache.block_size * padded, block = table[key / cache.block_size];
      prefetch(data + cache.offset(a.layer, 0, block) + at, 32 * padded);
      prefetch(data + cache.offset(a.layer, 1, block) + at, 32 * padded);
    }
    score_block(query, padded, key_units, units, two, work.scores);
    softmax_block(work, state, rows, units, start - key0, group, first_row, a.scale * 1.44269504f);
    weigh_values(work.probabilities, values, groups, padded, two, work.product);
    for (int r = 0; r < rows; ++r) {
      const Floats16 shrink = set1(work.shrink[r]);
      float *out = state.out + r * padded, *product = work.product + r * padded;
      for (int64_t d = 0; d < padded; d += 16) store(out + d, fma(load(out + d), shrink, load(product + d)));
    }
  }
}

void copy_state(const SoftmaxState& from, int64_t rows, int64_t padded, const SoftmaxState& to) {
  std::memcpy(to.best, from.best, static_cast<size_t>(rows) * 4);
  std::memcpy(to.mass, from.mass, static_cast<size_t>(rows) * 4);
  std::memcpy(to.out, from.out, static_cast<size_t>(rows * padded) * 4);
}

// Computes the keys of the partition from `begin` on.
void attend_task(const AttentionArgs& a, const Task& task, const uint16_t* all_queries, int64_t begin,
                 const SoftmaxState& state, Workspace& work) {
  const int64_t padded = a.cache->dim_padded, group = a.heads / a.cache->kv_heads;
  const int64_t first = a.cu_tokens[task.sequence] * group + task.first_row;
  const uint16_t* query = all_queries + (task.kv_head * query_rows(a) + first) * padded;
  const bool one = task.members == 1;
  attend(a, task.sequence, task.kv_head, query, task.first_row, task.rows, begin, one ? task.keys : task.shared, state,
         work);
  const int64_t alone = std::max<int64_t>(begin, task.shared);
  if (one || alone >= partition_end(begin)) return;
  for (int64_t i = 0; i < task.members; ++i) {  // each member continues from the state of the shared keys
    const SoftmaxState whole = state.from(i * group, padded);
    std::fill_n(work.own.best, kQueryRows, -INFINITY);
    std::fill_n(work.own.mass, kQueryRows, 0.0f);
    copy_state(whole, group, padded, work.own);
    attend(a, task.sequence + i, task.kv_head, query + i * group * padded, 0, static_cast<int>(group), alone,
           a.starts[task.sequence + i] + 1, work.own, work);
    copy_state(work.own, group, padded, whole);
  }
}

// Returns the workspace of the calling thread.
Workspace& workspace(int64_t padded) {
  const int64_t head = round_up(sizeof(Workspace), 64) / 4, matrix = kQueryRows * padded;
  const int64_t state = state_floats(kQueryRows, padded);
  float* memory = static_cast<float*>(scratch(kScratchTask, static_cast<size_t>(head + 2 * matrix + 3 * state) * 4));
  auto* work = reinterpret_cast<Workspace*>(memory);
  work->product = memory + head;
  work->values = reinterpret_cast<uint16_t*>(work->product + matrix);
  float* states = work->product + 2 * matrix;
  work->states[0] = state_in(states, kQueryRows);
  work->states[1] = state_in(states + state, kQueryRows);
  work->own = state_in(states + 2 * state, kQueryRows);
  return *work;
}

}  // namespace

void count_tasks(const AttentionArgs& a, int64_t* count) { *count = make_tasks(a, kSharesKeys).count; }

void attention(const AttentionArgs& a) {
  const int64_t elements = a.cache->kv_heads * query_rows(a) * a.cache->dim_padded;
  uint16_t* query = static_cast<uint16_t*>(scratch(kScratchQuery, static_cast<size_t>(elements) * 2));
  avx512::prepare_attention(a, query, true);
  const Tasks tasks = make_tasks(a, kSharesKeys);
  parallel_pieces(tasks.count, 1, [&](Pieces& pieces) {
    Workspace& work = workspace(a.cache->dim_padded);
    configure_tiles(kTileRows);  // last: an exception must not leave the tiles in use
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t t = begin; t < end; ++t)
        run_task(a, tasks.list[t], tasks.partials, work.states, kLogBase, [&](int64_t key, const SoftmaxState& state) {
          attend_task(a, tasks.list[t], query, key, state, work);
        });
    _tile_release();
  });
  merge_partials(a, tasks, kLogBase);
}

}  // namespace amx
}  // namespace fd
