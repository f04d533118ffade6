// Attention over the paged cache with vector FMA, and the preparation (norm, rotation, cache write) that the AMX
// version shares. Compiled once per instruction set.
#include "attention/attention.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "runtime/simd.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kMaxHeadDim = 512;
constexpr bool kSharesKeys = false;  // attend takes one sequence at a time
constexpr float kLogBase = 1.0f;     // scores are powers of e

#if defined(__AVX512F__)
constexpr int kRowGroup = 8;
#else
constexpr int kRowGroup = 4;
#endif

// out[0, Dp) = rotate(norm(x[0, D))), zero beyond D.
void norm_and_rotate(const AttentionArgs& a, const float* x, const float* norm, const float* cos, const float* sin,
                     float* out) {
  const int64_t dim = a.cache->head_dim, half = dim / 2;
  float factor = 1.0f;
  if (norm != nullptr) {
    Floats16 sum = zero();
    for (int64_t i = 0; i < dim; i += 16) {
      const Floats16 v = load_n(x + i, static_cast<int>(std::min<int64_t>(16, dim - i)));
      sum = fma(v, v, sum);
    }
    factor = 1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(dim) + a.norm_eps);
  }
  for (int64_t i = 0; i < half; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, half - i));
    Floats16 first = load_n(x + i, n), second = load_n(x + half + i, n);
    if (norm != nullptr) {
      first = mul(mul(first, set1(factor)), load_n(norm + i, n));
      second = mul(mul(second, set1(factor)), load_n(norm + half + i, n));
    }
    const Floats16 c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, sub(mul(first, c), mul(second, s)), n);
    store_n(out + half + i, add(mul(second, c), mul(first, s)), n);
  }
  for (int64_t i = dim; i < a.cache->dim_padded; ++i) out[i] = 0.0f;
}

// Returns whether x [dim] is finite in the type of the cache.
bool is_finite(const Cache& cache, const float* x) {
  Floats16 sum = zero();
  for (int64_t d = 0; d < cache.head_dim; d += 16) {
    const Floats16 v = load_n(x + d, static_cast<int>(std::min<int64_t>(16, cache.head_dim - d)));
    sum = fma(cache.bf16 ? round_bf16(v) : v, zero(), sum);  // 0 x infinity is NaN
  }
  return equal(sum, sum) == 0xffff;
}

// Writes the key and value of one head into their slot. The slot is the fastest axis of the keys (see kernels.h).
void write_slot(const Cache& cache, int64_t k_base, int64_t v_base, int64_t slot, const float* key,
                const float* value) {
  const int64_t dim = cache.head_dim, padded = cache.dim_padded;
  const int64_t unit = slot / 16 * 16 * padded;
  if (!cache.bf16) {
    float* data = static_cast<float*>(cache.data);
    float* k = data + k_base + unit + slot % 16;
    for (int64_t d = 0; d < dim; ++d) k[d * 16] = key[d];
    std::memcpy(data + v_base + slot * padded, value, static_cast<size_t>(dim) * 4);
    return;
  }
  uint16_t* data = static_cast<uint16_t*>(cache.data);
  uint16_t* k = data + k_base + unit + slot % 16 * 2;
  uint16_t* v = data + v_base + slot / 2 * 2 * padded;
  alignas(64) uint16_t rounded[kMaxHeadDim];
  for (int64_t d = 0; d < dim; d += 16) {  // zeros beyond dim, as there are already
    const int n = static_cast<int>(std::min<int64_t>(16, dim - d));
    store_bf16(rounded + d, load_n(key + d, n));
    store_half_pairs(v + d * 2, load_n(value + d, n), slot % 2 != 0);
  }
  for (int64_t d = 0; d < dim; d += 2) std::memcpy(k + d * 16, rounded + d, 4);
}

void prepare_token(const AttentionArgs& a, int64_t sequence, int64_t token, void* query, bool bf16) {
  const Cache& cache = *a.cache;
  const int64_t dim = cache.head_dim, padded = cache.dim_padded, group = a.heads / cache.kv_heads;
  const int64_t position = a.positions[token];
  const float* row = a.qkv + token * (a.heads + 2 * cache.kv_heads) * dim;
  const float *cos = a.rope_cos + position * (dim / 2), *sin = a.rope_sin + position * (dim / 2);
  alignas(64) float head[kMaxHeadDim];
  for (int64_t h = 0; h < a.heads; ++h) {
    norm_and_rotate(a, row + h * dim, a.q_norm, cos, sin, head);
    const int64_t to = (h / group * query_rows(a) + token * group + h % group) * padded;
    if (bf16) {
      uint16_t* q = static_cast<uint16_t*>(query) + to;
      for (int64_t d = 0; d < padded; d += 16) store_bf16(q + d, load(head + d));
    } else {
      std::memcpy(static_cast<float*>(query) + to, head, static_cast<size_t>(padded) * 4);
    }
  }
  const int64_t block = a.tables[sequence * a.table_width + position / cache.block_size];
  const int64_t slot = position % cache.block_size;
  const int64_t k_base = cache.offset(a.layer, 0, block), v_base = cache.offset(a.layer, 1, block);
  for (int64_t h = 0; h < cache.kv_heads; ++h) {
    norm_and_rotate(a, row + (a.heads + h) * dim, a.k_norm, cos, sin, head);
    const int64_t at = h * cache.block_size * padded;
    const float* value = row + (a.heads + cache.kv_heads + h) * dim;
    // A key or value that is not finite must change the rows after it, and no row before it. A row before it
    // multiplies its value by 0. So the value becomes 0. The key becomes NaN, and so do the scores of later rows.
    alignas(64) static constexpr float kZeros[kMaxHeadDim] = {};
    if (!is_finite(cache, head) || !is_finite(cache, value)) {
      head[0] = NAN;
      value = kZeros;
    }
    write_slot(cache, k_base + at, v_base + at, slot, head, value);
  }
}

// scores[r] += sum over d of query[r][d] * keys[d], for 16 keys.
template <bool Bf16, int Rows>
void dot_keys(const float* query, int64_t padded, const void* keys, Floats16* scores) {
  Floats16 acc[Rows];
  for (int r = 0; r < Rows; ++r) acc[r] = zero();
  for (int64_t d = 0; d < padded; d += 2) {
    Floats16 even, odd;
    if (Bf16) {
      const Pairs pair = load_pairs(static_cast<const uint16_t*>(keys) + d * 16);
      even = pair.low;
      odd = pair.high;
    } else {
      even = load(static_cast<const float*>(keys) + d * 16);
      odd = load(static_cast<const float*>(keys) + d * 16 + 16);
    }
    for (int r = 0; r < Rows; ++r) {
      acc[r] = fma(set1(query[r * padded + d]), even, acc[r]);
      acc[r] = fma(set1(query[r * padded + d + 1]), odd, acc[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) scores[r] = acc[r];
}

// out[r][d, d + 16) += sum over the first `count` of 16 keys of weights[r][key] * values[key][d, d + 16).
template <bool Bf16, int Rows>
void add_values(const float* weights, const void* values, int64_t padded, int64_t count, float* out) {
  for (int64_t d = 0; d < padded; d += 16) {
    Floats16 acc[Rows];
    for (int r = 0; r < Rows; ++r) acc[r] = load(out + r * padded + d);
    for (int64_t key = 0; key < count; key += 2) {
      Floats16 even, odd;
      const bool both = key + 1 < count;  // slots beyond the count may hold anything
      if (Bf16) {
        const Pairs pair = load_pairs(static_cast<const uint16_t*>(values) + key * padded + d * 2);
        even = pair.low;
        odd = pair.high;
      } else {
        even = load(static_cast<const float*>(values) + key * padded + d);
        odd = both ? load(static_cast<const float*>(values) + (key + 1) * padded + d) : zero();
      }
      for (int r = 0; r < Rows; ++r) {
        acc[r] = fma(set1(weights[r * kKeyBlock + key]), even, acc[r]);
        if (both) acc[r] = fma(set1(weights[r * kKeyBlock + key + 1]), odd, acc[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) store(out + r * padded + d, acc[r]);
  }
}

template <bool Bf16>
void dot_keys_rows(int rows, const float* query, int64_t padded, const void* keys, Floats16* scores) {
  int r = 0;
  for (; r + kRowGroup <= rows; r += kRowGroup) dot_keys<Bf16, kRowGroup>(query + r * padded, padded, keys, scores + r);
  for (; r < rows; ++r) dot_keys<Bf16, 1>(query + r * padded, padded, keys, scores + r);
}

template <bool Bf16>
void add_values_rows(int rows, const float* weights, const void* values, int64_t padded, int64_t count, float* out) {
  int r = 0;
  for (; r + kRowGroup <= rows; r += kRowGroup)
    add_values<Bf16, kRowGroup>(weights + r * kKeyBlock, values, padded, count, out + r * padded);
  for (; r < rows; ++r) add_values<Bf16, 1>(weights + r * kKeyBlock, values, padded, count, out + r * padded);
}

// Computes the keys of the partition from `begin` on. A row that sees none of them becomes NaN.
template <bool Bf16>
void attend(const AttentionArgs& a, const Task& task, const float* all_queries, int64_t begin,
            const SoftmaxState& state) {
  using Element = typename std::conditional<Bf16, uint16_t, float>::type;
  const Cache& cache = *a.cache;
  const int64_t padded = cache.dim_padded, group = a.heads / cache.kv_heads;
  const int64_t first_token = a.cu_tokens[task.sequence], start = a.starts[task.sequence];
  const float* query = all_queries + (task.kv_head * query_rows(a) + first_token * group + task.first_row) * padded;
  const int32_t* table = a.tables + task.sequence * a.table_width;
  const Element* data = static_cast<const Element*>(cache.data);
  const int64_t head_offset = task.kv_head * cache.block_size * padded;
  const int rows = task.rows;
  alignas(64) float scores[kQueryRows * kKeyBlock];

  const int64_t limit = std::min<int64_t>(task.keys, partition_end(begin));
  for (int64_t key0 = begin; key0 < limit; key0 += kKeyBlock) {
    const int64_t units = (std::min(kKeyBlock, limit - key0) + 15) / 16;
    for (int64_t u = 0; u < units; ++u) {
      const int64_t key = key0 + u * 16;
      const Element* keys = data + cache.offset(a.layer, 0, table[key / cache.block_size]) + head_offset +
                            key % cache.block_size * padded;
      Floats16 unit[kQueryRows];
      dot_keys_rows<Bf16>(rows, query, padded, keys, unit);
      for (int r = 0; r < rows; ++r) store(scores + r * kKeyBlock + u * 16, unit[r]);
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t visible = start + (task.first_row + r) / group + 1 - key0;  // may exceed the block or be negative
      float* row = scores + r * kKeyBlock;
      Floats16 top = set1(-INFINITY);
      for (int64_t u = 0; u < units; ++u) {
        const int64_t left = visible - u * 16;
        const Mask seen = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        const Floats16 s = select(seen, mul(load(row + u * 16), set1(a.scale)), set1(-INFINITY));
        store(row + u * 16, s);
        top = max(top, s);
      }
      const float new_best = std::max(state.best[r], reduce_max(top));
      alignas(64) float shrink[16];
      store(shrink, exp(set1(state.best[r] - new_best)));
      Floats16 sum = zero();
      for (int64_t u = 0; u < units; ++u) {
        const Floats16 p = exp(sub(load(row + u * 16), set1(new_best)));
        store(row + u * 16, p);
        sum = add(sum, p);
      }
      state.mass[r] = state.mass[r] * shrink[0] + reduce_add(sum);
      state.best[r] = new_best;
      float* out = state.out + r * padded;
      for (int64_t d = 0; d < padded; d += 16) store(out + d, mul(load(out + d), set1(shrink[0])));
    }
    for (int64_t u = 0; u < units; ++u) {
      const int64_t key = key0 + u * 16;
      const Element* values = data + cache.offset(a.layer, 1, table[key / cache.block_size]) + head_offset +
                              key % cache.block_size * padded;
      add_values_rows<Bf16>(rows, scores + u * 16, values, padded, std::min<int64_t>(16, limit - key), state.out);
    }
  }
}

}  // namespace

void count_tasks(const AttentionArgs& a, int64_t* count) { *count = make_tasks(a, kSharesKeys).count; }

void prepare_attention(const AttentionArgs& a, void* query, bool bf16) {
  const int64_t work = (a.heads + 2 * a.cache->kv_heads) * a.cache->head_dim;
  parallel_for(a.tokens, std::max<int64_t>(1, 8192 / work), [&](int64_t begin, int64_t end) {
    int64_t sequence = 0;
    for (int64_t t = begin; t < end; ++t) {
      while (a.cu_tokens[sequence + 1] <= t) ++sequence;
      prepare_token(a, sequence, t, query, bf16);
    }
  });
}

void attention(const AttentionArgs& a) {
  const int64_t elements = a.cache->kv_heads * query_rows(a) * a.cache->dim_padded;
  float* query = static_cast<float*>(scratch(kScratchQuery, static_cast<size_t>(elements) * 4));
  prepare_attention(a, query, false);
  const Tasks tasks = make_tasks(a, kSharesKeys);
  parallel_for(tasks.count, 1, [&](int64_t begin, int64_t end) {
    const int64_t floats = state_floats(kQueryRows, a.cache->dim_padded);
    float* memory = static_cast<float*>(scratch(kScratchTask, static_cast<size_t>(2 * floats) * 4));
    const SoftmaxState own[] = {state_in(memory, kQueryRows), state_in(memory + floats, kQueryRows)};
    for (int64_t t = begin; t < end; ++t)
      run_task(a, tasks.list[t], tasks.partials, own, kLogBase, [&](int64_t key, const SoftmaxState& state) {
        a.cache->bf16 ? attend<true>(a, tasks.list[t], query, key, state)
                      : attend<false>(a, tasks.list[t], query, key, state);
      });
  });
  merge_partials(a, tasks, kLogBase);
}

}  // namespace FD_ISA
}  // namespace fd
