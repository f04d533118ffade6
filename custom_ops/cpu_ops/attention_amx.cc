// Attention over a bfloat16 cache on AMX tiles: scores = q @ k.T and p @ v, both with bfloat16 operands and float32
// accumulators; the softmax in between on vectors. The cache holds keys and values in the order of right tiles
// (kernels.h), so nothing is rearranged here, in decode or in prefill.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "attention.h"
#include "rough.h"
#include "simd.h"
#include "tiles.h"

namespace fd {
namespace amx {
namespace {

// Rows of a left tile, always: those beyond a task's own compute on whatever lies behind its queries; a row of the
// result depends on its own left row alone.
constexpr int64_t kTileRows = 16;
constexpr bool kShare = true;  // a tile has room for the rows of several sequences

// One task's memory: scores and products of 32 rows, their probabilities as bfloat16 left tiles.
struct alignas(64) Workspace {
  float scores[kQueryRows * kKeyBlock];
  uint16_t probabilities[kQueryRows * kKeyBlock];
  float best[kQueryRows], mass[kQueryRows], shrink[kQueryRows];  // best: in powers of 2
  float* out;        // [32][Dp]
  float* product;    // [32][Dp]
  uint16_t* values;  // [2][16][Dp][2], for groups of 32 keys that cannot be read in place
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
  return rough_exp2(x, _mm512_mask_cmp_ps_mask(wanted, x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ));
}

// Online softmax over one key block, in powers of 2. Row r sees the first start + (first_row + r) / group + 1 of its
// keys, `start` being relative to the block (and so perhaps negative). `scale` includes log2(e).
void softmax_block(Workspace& work, int rows, int64_t units, int64_t start, int64_t group, int64_t first_row,
                   float scale) {
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
    best[r] = std::max(work.best[r], reduce_max({top}) * scale);
  }
  for (int r = 0; r < rows; r += 16) {  // whole vectors: rows beyond the last compute on leftovers, for nobody
    const __m512 fresh = _mm512_load_ps(best + r);
    _mm512_store_ps(work.shrink + r, exp2_or_zero(_mm512_sub_ps(_mm512_load_ps(work.best + r), fresh), 0xffff));
    _mm512_store_ps(work.best + r, fresh);
    _mm512_store_ps(work.mass + r, _mm512_mul_ps(_mm512_load_ps(work.mass + r), _mm512_load_ps(work.shrink + r)));
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
    work.mass[r] += reduce_add({sum});
  }
}

inline void prefetch(const void* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(data) + i, _MM_HINT_T1);
}

// Copies the values of 16 keys, zeroing slots from `count` on: they may hold what an earlier owner of the block left
// there, and 0 x infinity is NaN.
void copy_values(const uint16_t* from, int64_t padded, int64_t count, uint16_t* to) {
  if (count < 16) std::memset(to, 0, static_cast<size_t>(16 * padded) * 2);
  if (count == 0) return;
  std::memcpy(to, from, static_cast<size_t>(count / 2 * 2 * padded) * 2);
  if (count % 2 == 0) return;
  const uint16_t* last = from + count / 2 * 2 * padded;
  for (int64_t d = 0; d < padded; ++d) to[count / 2 * 2 * padded + d * 2] = last[d * 2];
}

// Goes through keys [begin, limit) of a sequence for `rows` queries from the first_row-th of the sequence's rows on;
// begin is a multiple of 64. Adds to what `work` holds of the keys before.
void attend(const AttentionArgs& a, int64_t sequence, int64_t kv_head, const uint16_t* query, int64_t first_row,
            int rows, int64_t begin, int64_t limit, Workspace& work) {
  const Cache& cache = *a.cache;
  const int64_t padded = cache.dim_padded, group = a.heads / cache.kv_heads, start = a.starts[sequence];
  const int32_t* table = a.tables + sequence * a.table_width;
  const uint16_t* data = static_cast<const uint16_t*>(cache.data);
  const int64_t head_offset = kv_head * cache.block_size * padded;
  const bool two = rows > 16;
  for (int64_t key0 = begin; key0 < limit; key0 += kKeyBlock) {
    const int64_t here = std::min(kKeyBlock, limit - key0);
    const int64_t units = (here + 15) / 16, groups = (here + 31) / 32;
    const uint16_t *keys[kKeyBlock / 16], *values[kKeyBlock / 32];
    for (int64_t u = 0; u < units; ++u) {
      const int64_t key = key0 + u * 16;
      keys[u] = data + cache.offset(a.layer, 0, table[key / cache.block_size]) + head_offset +
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
      // The end of the sequence, or a group that straddles two blocks of 16.
      uint16_t* copy = work.values + g * 32 * padded;
      for (int64_t half = 0; half < 32; half += 16) {
        const int64_t count = std::clamp<int64_t>(limit - key - half, 0, 16);
        copy_values(count > 0 ? values_at(key + half) : nullptr, padded, count, copy + half * padded);
      }
      values[g] = copy;
    }
    // Decode reads keys and values from memory: fetch the next block's while this one is worked on.
    for (int64_t key = key0 + kKeyBlock; key < std::min(limit, key0 + 2 * kKeyBlock); key += 16) {
      const int64_t at = head_offset + key % cache.block_size * padded, block = table[key / cache.block_size];
      prefetch(data + cache.offset(a.layer, 0, block) + at, 32 * padded);
      prefetch(data + cache.offset(a.layer, 1, block) + at, 32 * padded);
    }
    score_block(query, padded, keys, units, two, work.scores);
    softmax_block(work, rows, units, start - key0, group, first_row, a.scale * 1.44269504f);
    weigh_values(work.probabilities, values, groups, padded, two, work.product);
    for (int r = 0; r < rows; ++r) {
      const F16 shrink = set1(work.shrink[r]);
      float *out = work.out + r * padded, *product = work.product + r * padded;
      for (int64_t d = 0; d < padded; d += 16) store(out + d, fma(load(out + d), shrink, load(product + d)));
    }
  }
}

// Results of `rows` rows from the first_row-th of the sequence's on.
void write_out(const AttentionArgs& a, int64_t sequence, int64_t kv_head, int64_t first_row, int rows,
               const Workspace& work) {
  const int64_t dim = a.cache->head_dim, group = a.heads / a.cache->kv_heads;
  for (int r = 0; r < rows; ++r) {
    const int64_t row = first_row + r, token = a.cu_tokens[sequence] + row / group;
    float* to = a.out + (token * a.heads + kv_head * group + row % group) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      const int n = static_cast<int>(std::min<int64_t>(16, dim - d));
      store_n(to + d, div(load(work.out + r * a.cache->dim_padded + d), set1(work.mass[r])), n);
    }
  }
}

void run_task(const AttentionArgs& a, const Task& task, const uint16_t* all_queries, Workspace& work,
              Workspace& own) {
  const int64_t padded = a.cache->dim_padded, group = a.heads / a.cache->kv_heads;
  const int64_t first = a.cu_tokens[task.sequence] * group + task.first_row;
  const uint16_t* query = all_queries + (task.kv_head * query_rows(a) + first) * padded;
  std::memset(work.out, 0, static_cast<size_t>(task.rows * padded) * 4);
  for (int r = 0; r < kQueryRows; ++r) work.best[r] = -INFINITY, work.mass[r] = 0.0f;
  if (task.members == 1) {
    const int64_t limit = a.starts[task.sequence] + (task.first_row + task.rows - 1) / group + 1;  // seen by the last
    attend(a, task.sequence, task.kv_head, query, task.first_row, task.rows, 0, limit, work);
    write_out(a, task.sequence, task.kv_head, task.first_row, task.rows, work);
    return;
  }
  attend(a, task.sequence, task.kv_head, query, 0, task.rows, 0, task.shared, work);
  for (int64_t i = 0; i < task.members; ++i) {  // each goes on alone from where all are
    const int64_t sequence = task.sequence + i;
    for (int r = 0; r < kQueryRows; ++r) own.best[r] = -INFINITY, own.mass[r] = 0.0f;
    std::memcpy(own.best, work.best + i * group, static_cast<size_t>(group) * 4);
    std::memcpy(own.mass, work.mass + i * group, static_cast<size_t>(group) * 4);
    std::memcpy(own.out, work.out + i * group * padded, static_cast<size_t>(group * padded) * 4);
    attend(a, sequence, task.kv_head, query + i * group * padded, 0, static_cast<int>(group), task.shared,
           a.starts[sequence] + 1, own);
    write_out(a, sequence, task.kv_head, 0, static_cast<int>(group), own);
  }
}

// index: 0 or 1; each thread has two.
Workspace& workspace(int64_t padded, int index) {
  const size_t matrix = static_cast<size_t>(kQueryRows * padded) * 4, head = round_up(sizeof(Workspace), 64);
  const size_t whole = head + 3 * matrix;
  char* memory = static_cast<char*>(scratch(kScratchTask, 2 * whole)) + static_cast<size_t>(index) * whole;
  auto* work = reinterpret_cast<Workspace*>(memory);
  work->out = reinterpret_cast<float*>(memory + head);
  work->product = reinterpret_cast<float*>(memory + head + matrix);
  work->values = reinterpret_cast<uint16_t*>(memory + head + 2 * matrix);
  return *work;
}

}  // namespace

void count_tasks(const AttentionArgs& a, int64_t* count) {
  Task* tasks;
  *count = make_tasks(a, kShare, &tasks);
}

void attention(const AttentionArgs& a) {
  const int64_t elements = a.cache->kv_heads * query_rows(a) * a.cache->dim_padded;
  uint16_t* query = static_cast<uint16_t*>(scratch(kScratchQuery, static_cast<size_t>(elements) * 2));
  avx512::prepare_attention(a, query, true);
  Task* tasks;
  const int64_t count = make_tasks(a, kShare, &tasks);
  parallel_pieces(count, 1, [&](Pieces& pieces) {
    Workspace &work = workspace(a.cache->dim_padded, 0), &own = workspace(a.cache->dim_padded, 1);
    configure_tiles(kTileRows);  // last: an exception must not leave the tiles in use
    for (int64_t begin, end; pieces.next(&begin, &end);)
      for (int64_t t = begin; t < end; ++t) run_task(a, tasks[t], query, work, own);
    _tile_release();
  });
}

}  // namespace amx
}  // namespace fd
