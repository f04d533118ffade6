// Norm and rotation of queries and keys, and the cache writes of a step. Compiled once per instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/tasks.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kMaxHeadDim = 576;

// out[0, D) = rotate(x[0, D)) with the pairs (x[2i], x[2i + 1]) of the first `rotated` values. norm: null, or what x is
// multiplied with.
void rotate_neighbours(const float* x, int64_t dim, int64_t rotated, float factor, const float* norm, const float* cos,
                       const float* sin, float* out) {
  alignas(64) float normed[kMaxHeadDim];
  if (norm != nullptr) {
    for (int64_t i = 0; i < dim; ++i) normed[i] = x[i] * factor * norm[i];
    x = normed;
  }
  std::copy(x + rotated, x + dim, out + rotated);
  for (int64_t i = 0; i < rotated / 2; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1];
    out[2 * i] = first * cos[i] - second * sin[i];
    out[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

// out[0, Dp) = rotate(norm(x[0, D))), zero beyond D.
void norm_and_rotate(const AttentionArgs& a, const float* x, const float* norm, const float* cos, const float* sin,
                     float* out) {
  const int64_t dim = a.cache->head_dim, rotated = a.rotated(), half = rotated / 2;
  float factor = 1.0f;
  if (norm != nullptr) {
    Floats16 sum = zero();
    for (int64_t i = 0; i < dim; i += 16) {
      const Floats16 v = load_n(x + i, static_cast<int>(std::min<int64_t>(16, dim - i)));
      sum = fma(v, v, sum);
    }
    factor = 1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(dim) + a.norm_eps);
  }
  for (int64_t i = dim; i < a.cache->dim_padded; ++i) out[i] = 0.0f;
  if (a.interleaved) return rotate_neighbours(x, dim, rotated, factor, norm, cos, sin, out);
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
  for (int64_t i = rotated; i < dim; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, dim - i));
    const Floats16 v = load_n(x + i, n);
    store_n(out + i, norm == nullptr ? v : mul(mul(v, set1(factor)), load_n(norm + i, n)), n);
  }
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

// Writes the key and value of one head into their slot. The slot is the fastest axis of the keys (see kernels.h). A
// cache of one part takes no value.
void write_slot(const Cache& cache, int64_t k_base, int64_t v_base, int64_t slot, const float* key,
                const float* value) {
  const int64_t dim = cache.head_dim, padded = cache.dim_padded;
  const int64_t unit = slot / 16 * 16 * padded;
  if (!cache.bf16) {
    float* data = static_cast<float*>(cache.data);
    float* k = data + k_base + unit + slot % 16;
    for (int64_t d = 0; d < dim; ++d) k[d * 16] = key[d];
    if (cache.parts == 2) std::memcpy(data + v_base + slot * padded, value, static_cast<size_t>(dim) * 4);
    return;
  }
  uint16_t* data = static_cast<uint16_t*>(cache.data);
  uint16_t* k = data + k_base + unit + slot % 16 * 2;
  uint16_t* v = data + v_base + slot / 2 * 2 * padded;
  alignas(64) uint16_t rounded[kMaxHeadDim];
  for (int64_t d = 0; d < dim; d += 16) {  // zeros beyond dim, as there are already
    const int n = static_cast<int>(std::min<int64_t>(16, dim - d));
    store_bf16(rounded + d, load_n(key + d, n));
    if (cache.parts == 2) store_half_pairs(v + d * 2, load_n(value + d, n), slot % 2 != 0);
  }
  for (int64_t d = 0; d < dim; d += 2) std::memcpy(k + d * 16, rounded + d, 4);
}

void prepare_token(const AttentionArgs& a, int64_t sequence, int64_t token, void* query, bool bf16) {
  const Cache& cache = *a.cache;
  const int64_t dim = cache.head_dim, padded = cache.dim_padded, group = a.heads / cache.kv_heads;
  const int64_t position = a.positions[token];
  const float* row = a.qkv + token * (a.heads + cache.parts * cache.kv_heads) * dim;
  const int64_t pairs = a.rotated() / 2;
  const float *cos = a.rope_cos + position * pairs, *sin = a.rope_sin + position * pairs;
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
    const float* value = cache.parts == 2 ? row + (a.heads + cache.kv_heads + h) * dim : head;
    // A key or value that is not finite must change the rows after it, and no row before it. A row before it
    // multiplies its value by 0. So the value becomes 0. The key becomes NaN, and so do the scores of later rows. Of a
    // cache of one part, the key is 0 but for its first number, which is 0 where it is read as a value.
    alignas(64) static constexpr float kZeros[kMaxHeadDim] = {};
    if (!is_finite(cache, head) || !is_finite(cache, value)) {
      std::fill_n(head, dim, 0.0f);
      head[0] = NAN;
      value = kZeros;
    }
    write_slot(cache, k_base + at, v_base + at, slot, head, value);
  }
}

}  // namespace

void prepare_attention(const AttentionArgs& a, void* query, bool bf16) {
  const int64_t work = (a.heads + a.cache->parts * a.cache->kv_heads) * a.cache->head_dim;
  parallel_for(a.tokens, std::max<int64_t>(1, 8192 / work), [&](int64_t begin, int64_t end) {
    int64_t sequence = 0;
    for (int64_t t = begin; t < end; ++t) {
      while (a.cu_tokens[sequence + 1] <= t) ++sequence;
      prepare_token(a, sequence, t, query, bf16);
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
