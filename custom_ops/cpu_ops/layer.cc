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

// residual += down(activation(gate(norm(residual))) * up(norm(residual))).
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
  mlp_block(*static_cast<const MlpBlock*>(block.fields), step);
}

int64_t block_bytes(int64_t kind) {
  constexpr int64_t kBytes[] = {sizeof(AttentionBlock), sizeof(MlpBlock)};
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
