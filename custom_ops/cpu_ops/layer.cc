// The blocks of a decoder layer, and single linears. Compiled once per instruction set. The structures of blocks have
// the fields of the classes of these names in ops/blocks.py, in the same order.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "experts/experts.h"
#include "keep_rows.h"
#include "linear/products.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

struct AttentionBlock {
  const float* norm;  // of the residual, [hidden]
  float norm_eps;
  const Weight* qkv;
  AttentionSpec attention;
  const Weight* o;
  const float* post_norm;  // of what is added to the residual, or null
};

struct MlpBlock {
  const float* norm;
  float norm_eps;
  const Weight *gate_up, *down;
  Activation activation;
  const float* post_norm;
};

struct LatentAttentionBlock {
  const float* norm;
  float norm_eps;
  const Weight *q, *kv_a;
  const float* kv_norm;
  const Weight *kv_b, *absorbed;
  AttentionSpec attention;
  const Weight* o;
  const Weight* q_a;  // null: q reads the residual
  const float* q_norm;
};

// The adapters of a linear of a block, by its number.
LoraRows of_linear(LoraRows loras, int64_t number) {
  loras.linear += number;
  return loras;
}

// residual += input @ w.T, the last linear of a block; with post_norm, residual += RMSNorm(input @ w.T).
void add_output(const LinearInput& input, const Weight& w, const LoraRows& loras, const float* post_norm, float eps,
                const StepState& step) {
  if (post_norm == nullptr) return product(input, w, loras, step.residual, true);
  float* out = floats(kScratchOutput, step.m * w.n);
  product(input, w, loras, out, false);
  parallel_for(step.m, std::max<int64_t>(1, 16384 / w.n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = out + r * w.n;
      float* to = step.residual + r * w.n;
      const Floats16 factor = set1(norm_factor(from, w.n, eps));
      for (int64_t i = 0; i < w.n; i += 16) {
        const int count = static_cast<int>(std::min<int64_t>(16, w.n - i));
        const Floats16 normed = mul(mul(load_n(from + i, count), factor), load_n(post_norm + i, count));
        store_n(to + i, add(load_n(to + i, count), normed), count);
      }
    }
  });
}

// residual += o(attention(qkv(norm(residual)))). Keeps only step.rows of the residual, if these are given.
void attention_block(const AttentionBlock& block, StepState& step) {
  const int64_t hidden = block.qkv->k, width = block.o->k;
  float* qkv = floats(kScratchQkv, step.m * block.qkv->n);
  float* attended = floats(kScratchAttended, step.m * width);
  product(input_of(kScratchInput, step.residual, block.norm, block.norm_eps, step.m, *block.qkv), *block.qkv,
          step.loras, qkv, false);
  attention({step.batch, block.attention, step.cache, qkv, attended});
  keep_rows(step, hidden, attended, width);
  if (step.m == 0) return;
  const LinearInput input = input_of(kScratchInput, attended, nullptr, 0, step.m, *block.o);
  add_output(input, *block.o, of_linear(step.loras, 1), block.post_norm, block.norm_eps, step);
}

inline void copy(const float* from, int64_t count, float* to) { std::memcpy(to, from, static_cast<size_t>(count) * 4); }

// Rows of an array that belong to heads: those of head h begin h * step numbers behind those of the first, and a row
// `width` numbers behind the row before.
struct HeadRows {
  float* first;
  int64_t width, step;

  float* at(int64_t row, int64_t head) const { return first + row * width + head * step; }
};

// to [m, n] = from [m, k] @ columns [first + h * step, first + h * step + n) of w, for each head h. One thread computes
// a head.
void head_products(const HeadRows& from, int64_t heads, int64_t m, const Weight& w, int64_t first, int64_t step,
                   int64_t n, const HeadRows& to) {
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      const Weight of_head = columns_of(w, first + h * step, n);
      float *x = floats(kScratchHeadRows, m * (w.k + n)), *out = x + m * w.k;
      for (int64_t r = 0; r < m; ++r) copy(from.at(r, h), w.k, x + r * w.k);
      multiply(make_linear_input(kScratchHeadInput, x, nullptr, 0, m, of_head), of_head, {}, out, false);
      for (int64_t r = 0; r < m; ++r) copy(out + r * n, n, to.at(r, h));
    }
  });
}

// See LatentAttentionBlock of ops/blocks.py. Keeps only step.rows of the residual, if these are given.
void latent_attention_block(const LatentAttentionBlock& block, StepState& step) {
  const AttentionSpec& spec = block.attention;
  const int64_t m = step.m, heads = spec.heads, key = spec.head_dim, rotary = spec.rotary_dim, latent = block.kv_b->k;
  const int64_t plain = block.absorbed->k, query = plain + rotary, value = block.kv_b->n / heads - plain;
  const int64_t inner = block.q_a == nullptr ? 0 : block.q_a->n;
  float* kv = floats(kScratchLatent, m * (key + inner + heads * query));
  float *q_a = kv + m * key, *q = q_a + m * inner;
  int64_t linear = 0;
  LinearInput input = input_of(kScratchInput, step.residual, block.norm, block.norm_eps, m, *block.kv_a);
  product(input, *block.kv_a, of_linear(step.loras, linear++), kv, false);
  if (block.q_a != nullptr) {
    product(input, *block.q_a, of_linear(step.loras, linear++), q_a, false);
    input = input_of(kScratchInput, q_a, block.q_norm, spec.norm_eps, m, *block.q);
  }
  product(input, *block.q, of_linear(step.loras, linear++), q, false);
  const int64_t width = (heads + 1) * key;  // of a row of attention: the queries, then the key
  float* rows = floats(kScratchQkv, m * width);
  head_products({q, heads * query, query}, heads, m, *block.absorbed, 0, latent, latent, {rows + rotary, width, key});
  parallel_for(m, std::max<int64_t>(1, 16384 / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = kv + r * key;
      float* to = rows + r * width;
      for (int64_t h = 0; h < heads; ++h) copy(q + (r * heads + h) * query + plain, rotary, to + h * key);
      to += heads * key;
      copy(from + latent, rotary, to);
      const Floats16 factor = set1(norm_factor(from, latent, spec.norm_eps));
      for (int64_t i = 0; i < latent; i += 16)
        store(to + rotary + i, mul(mul(load(from + i), factor), load(block.kv_norm + i)));
    }
  });
  float* attended = floats(kScratchAttended, m * heads * key);
  attention({step.batch, spec, step.cache, rows, attended});
  keep_rows(step, block.o->n, attended, heads * key);
  if (step.m == 0) return;
  float* values = floats(kScratchLatent, step.m * heads * value);
  head_products({attended + rotary, heads * key, key}, heads, step.m, *block.kv_b, plain, plain + value, value,
                {values, heads * value, value});
  input = input_of(kScratchInput, values, nullptr, 0, step.m, *block.o);
  add_output(input, *block.o, of_linear(step.loras, linear), nullptr, 0, step);
}

// residual += down(activation(gate(norm(residual)), up(norm(residual)))). The activation is a function of both.
void mlp_block(const MlpBlock& block, const StepState& step) {
  if (step.m == 0) return;
  const LinearInput input = input_of(kScratchInput, step.residual, block.norm, block.norm_eps, step.m, *block.gate_up);
  const LinearInput inner =
      gated_product(kScratchInner, input, *block.gate_up, step.loras, block.activation, *block.down);
  add_output(inner, *block.down, of_linear(step.loras, 1), block.post_norm, block.norm_eps, step);
}

}  // namespace

void run_block(const Block& block, StepState& step) {
  if (block.kind == kAttentionBlock) return attention_block(*static_cast<const AttentionBlock*>(block.fields), step);
  if (block.kind == kExpertsBlock) return experts_block(*static_cast<const ExpertsBlock*>(block.fields), step);
  if (block.kind == kLatentAttentionBlock)
    return latent_attention_block(*static_cast<const LatentAttentionBlock*>(block.fields), step);
  mlp_block(*static_cast<const MlpBlock*>(block.fields), step);
}

int64_t block_bytes(int64_t kind) {
  constexpr int64_t kBytes[] = {sizeof(AttentionBlock), sizeof(MlpBlock), sizeof(ExpertsBlock),
                                sizeof(LatentAttentionBlock)};
  return kind < static_cast<int64_t>(std::size(kBytes)) ? kBytes[kind] : 0;
}

void linear(const float* x, const float* norm, float eps, int64_t m, const Weight& w, const LoraRows& loras,
            float* out) {
  product(input_of(kScratchInput, x, norm, eps, m, w), w, loras, out, false);
}

void mlp(const float* x, int64_t m, const Weight& gate_up, const Weight& down, float* out) {
  const LinearInput input = input_of(kScratchInput, x, nullptr, 0, m, gate_up);
  product(gated_product(kScratchInner, input, gate_up, {}, kSilu, down), down, {}, out, false);
}

}  // namespace FD_ISA
}  // namespace fd
