// The blocks of a decoder layer, and single linears. Compiled once per instruction set. The structures of blocks have
// the fields of the classes of these names in ops/interface.py, in the same order.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "linear/linear.h"
#include "linear/linear_int8.h"
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

float* floats(ScratchSlot slot, int64_t count) {
  return static_cast<float*>(scratch(slot, static_cast<size_t>(count) * 4));
}

// out[i] = x[rows[i]]; rows ascend, so that out may be x.
void pick_rows(const float* x, const int64_t* rows, int64_t count, int64_t width, float* out) {
  for (int64_t i = 0; i < count; ++i)
    std::memmove(out + i * width, x + rows[i] * width, static_cast<size_t>(width) * 4);
}

// The adapters of the picked rows.
const int32_t* pick_adapters(const int32_t* adapters, const int64_t* rows, int64_t count) {
  auto* picked = static_cast<int32_t*>(scratch(kScratchLoraRows, static_cast<size_t>(count) * 4));
  for (int64_t i = 0; i < count; ++i) picked[i] = adapters[rows[i]];
  return picked;
}

// The functions of linear.h, or of linear_int8.h for a weight with int8 values. All linears of a block have them, or
// none has.
LinearInput input_of(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m, const Weight& w) {
  return (w.int8 == nullptr ? make_linear_input : int8_linears().make_input)(slot, x, norm, eps, m, w);
}

void product(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate) {
  (w.int8 == nullptr ? multiply : int8_linears().multiply)(input, w, loras, out, accumulate);
}

// multiply_gated of any width. Where gate and up share a column tile, both products are stored before they are
// combined.
LinearInput gated_product(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                          Activation activation, const Weight& next) {
  const int64_t half = w.n / 2;
  if (half % kColumns == 0)
    return (w.int8 == nullptr ? multiply_gated : int8_linears().multiply_gated)(slot, input, w, loras, activation,
                                                                                next);
  float* both = floats(kScratchGateUp, input.m * w.n);
  product(input, w, loras, both, false);
  for (int64_t r = 0; r < input.m; ++r)
    for (int64_t i = 0; i < half; i += 16) {
      const int count = static_cast<int>(half - i < 16 ? half - i : 16);
      const float *gate = both + r * w.n + i, *up = gate + half;
      const Floats16 left = activated(activation, load_n(gate, count));
      store_n(both + r * half + i, mul(left, load_n(up, count)), count);  // after all reads
    }
  return input_of(slot, both, nullptr, 0, input.m, next);
}

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

// Drops all rows but step.rows of the residual [m, hidden] and of x [m, width], if these are given.
void keep_rows(StepState& step, int64_t hidden, float* x, int64_t width) {
  if (step.rows == nullptr) return;
  step.m = step.num_rows;
  pick_rows(x, step.rows, step.m, width, x);
  pick_rows(step.residual, step.rows, step.m, hidden, step.residual);
  if (step.loras.rows != nullptr) step.loras.rows = pick_adapters(step.loras.rows, step.rows, step.m);
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

// out [heads][m][n] = x [heads][m][k] @ w_h.T. w_h: of each head, rows [first + h * step, first + h * step + n) of w.
void head_products(const float* x, int64_t heads, int64_t m, const Weight& w, int64_t first, int64_t step, int64_t n,
                   float* out) {
  for (int64_t h = 0; h < heads; ++h) {
    Weight of_head = w;
    const int64_t at = (first + h * step) / kColumns * w.tile_elements() * (w.bf16 ? 2 : 4);
    of_head.data = static_cast<char*>(w.data) + at;
    of_head.n = n;
    const LinearInput input = make_linear_input(kScratchInput, x + h * m * w.k, nullptr, 0, m, of_head);
    multiply(input, of_head, {}, out + h * m * n, false);
  }
}

// Calls body(row, head) for all rows and heads, each of which moves `width` numbers, on all threads.
template <typename Body>
void for_heads(int64_t m, int64_t heads, int64_t width, Body&& body) {
  parallel_for(m, std::max<int64_t>(1, 16384 / (heads * width)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < heads; ++h) body(r, h);
  });
}

inline void copy(const float* from, int64_t count, float* to) { std::memcpy(to, from, static_cast<size_t>(count) * 4); }

// See LatentAttentionBlock of ops/interface.py. Arrays by head are [heads][m][...], those by row [m][heads][...].
void latent_attention_block(const LatentAttentionBlock& block, StepState& step) {
  const AttentionSpec& spec = block.attention;
  const int64_t m = step.m, heads = spec.heads, key = spec.head_dim, rotary = spec.rotary_dim, rank = block.kv_b->k;
  const int64_t plain = block.absorbed->k, query = plain + rotary, value = block.kv_b->n / heads - plain;
  int64_t linear = 0;
  const int64_t inner = block.q_a == nullptr ? 0 : block.q_a->n;
  float* kv = floats(kScratchLatent, m * (key + inner + heads * (query + plain + rank)));
  float *q_a = kv + m * key, *q = q_a + m * inner, *plain_q = q + m * heads * query;
  float* absorbed = plain_q + m * heads * plain;
  LinearInput input = input_of(kScratchInput, step.residual, block.norm, block.norm_eps, m, *block.kv_a);
  product(input, *block.kv_a, of_linear(step.loras, linear++), kv, false);
  if (block.q_a != nullptr) {
    product(input, *block.q_a, of_linear(step.loras, linear++), q_a, false);
    input = input_of(kScratchInput, q_a, block.q_norm, spec.norm_eps, m, *block.q);
  }
  product(input, *block.q, of_linear(step.loras, linear++), q, false);
  for_heads(m, heads, plain,
            [&](int64_t r, int64_t h) { copy(q + (r * heads + h) * query, plain, plain_q + (h * m + r) * plain); });
  head_products(plain_q, heads, m, *block.absorbed, 0, rank, rank, absorbed);
  float* rows = floats(kScratchQkv, m * (heads + 1) * key);  // queries, then the key
  for_heads(m, heads + 1, key, [&](int64_t r, int64_t h) {
    float* to = rows + (r * (heads + 1) + h) * key;
    if (h < heads) {
      copy(q + (r * heads + h) * query + plain, rotary, to);
      return copy(absorbed + (h * m + r) * rank, rank, to + rotary);
    }
    const float* from = kv + r * key;
    copy(from + rank, rotary, to);
    const Floats16 factor = set1(norm_factor(from, rank, spec.norm_eps));
    for (int64_t i = 0; i < rank; i += 16)
      store(to + rotary + i, mul(mul(load(from + i), factor), load(block.kv_norm + i)));
  });
  float* attended = floats(kScratchAttended, m * heads * key);
  attention({step.batch, spec, step.cache, rows, attended});
  keep_rows(step, block.o->n, attended, heads * key);
  const int64_t left = step.m;
  if (left == 0) return;
  float* latents = floats(kScratchLatent, left * heads * (rank + 2 * value));
  float *values = latents + left * heads * rank, *of_rows = values + left * heads * value;
  for_heads(left, heads, rank, [&](int64_t r, int64_t h) {
    copy(attended + (r * heads + h) * key + rotary, rank, latents + (h * left + r) * rank);
  });
  head_products(latents, heads, left, *block.kv_b, plain, plain + value, value, values);
  for_heads(left, heads, value, [&](int64_t r, int64_t h) {
    copy(values + (h * left + r) * value, value, of_rows + (r * heads + h) * value);
  });
  input = input_of(kScratchInput, of_rows, nullptr, 0, left, *block.o);
  add_output(input, *block.o, of_linear(step.loras, linear), nullptr, 0, step);
}

// residual += down(activation(gate(norm(residual))) * up(norm(residual))).
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
  if (block.kind == kLatentAttentionBlock)
    return latent_attention_block(*static_cast<const LatentAttentionBlock*>(block.fields), step);
  mlp_block(*static_cast<const MlpBlock*>(block.fields), step);
}

int64_t block_bytes(int64_t kind) {
  constexpr int64_t kBytes[] = {sizeof(AttentionBlock), sizeof(MlpBlock), sizeof(LatentAttentionBlock)};
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
