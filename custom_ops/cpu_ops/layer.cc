// The blocks of a decoder layer, and single linears. Compiled once per instruction set. The structures of blocks have
// the fields of the classes of these names in ops/interface.py, in the same order.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "experts/experts.h"
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

// The adapters of the second linear of a block.
LoraRows second(LoraRows loras) {
  ++loras.linear;
  return loras;
}

// residual += input @ w.T, the last linear of a block; with post_norm, residual += RMSNorm(input @ w.T).
void add_output(const LinearInput& input, const Weight& w, const float* post_norm, float eps, const StepState& step) {
  const LoraRows loras = second(step.loras);
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
  if (step.rows != nullptr) {
    step.m = step.num_rows;
    pick_rows(attended, step.rows, step.m, width, attended);
    pick_rows(step.residual, step.rows, step.m, hidden, step.residual);
    if (step.loras.rows != nullptr) step.loras.rows = pick_adapters(step.loras.rows, step.rows, step.m);
  }
  if (step.m == 0) return;
  const LinearInput input = input_of(kScratchInput, attended, nullptr, 0, step.m, *block.o);
  add_output(input, *block.o, block.post_norm, block.norm_eps, step);
}

// residual += down(activation(gate(norm(residual)), up(norm(residual)))). The activation is a function of both.
void mlp_block(const MlpBlock& block, const StepState& step) {
  if (step.m == 0) return;
  const LinearInput input = input_of(kScratchInput, step.residual, block.norm, block.norm_eps, step.m, *block.gate_up);
  const LinearInput inner =
      gated_product(kScratchInner, input, *block.gate_up, step.loras, block.activation, *block.down);
  add_output(inner, *block.down, block.post_norm, block.norm_eps, step);
}

}  // namespace

void run_block(const Block& block, StepState& step) {
  if (block.kind == kAttentionBlock) return attention_block(*static_cast<const AttentionBlock*>(block.fields), step);
  if (block.kind == kExpertsBlock) return experts_block(*static_cast<const ExpertsBlock*>(block.fields), step);
  mlp_block(*static_cast<const MlpBlock*>(block.fields), step);
}

int64_t block_bytes(int64_t kind) {
  constexpr int64_t kBytes[] = {sizeof(AttentionBlock), sizeof(MlpBlock), sizeof(ExpertsBlock)};
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
