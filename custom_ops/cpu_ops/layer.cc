// A decoder layer, and the logits at the end, in terms of left.h. Compiled once per instruction set.
#include <cstring>

#include "left.h"
#include "thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

float* floats(ScratchSlot slot, int64_t count) {
  return static_cast<float*>(scratch(slot, static_cast<size_t>(count) * 4));
}

// out[i] = x[rows[i]]; rows ascend, so that out may be x.
void pick_rows(const float* x, const int64_t* rows, int64_t count, int64_t width, float* out) {
  for (int64_t i = 0; i < count; ++i)
    std::memmove(out + i * width, x + rows[i] * width, static_cast<size_t>(width) * 4);
}

// multiply_gated of any width. Where gate and up share a column tile, their products are multiplied by themselves.
Left multiply_any_gated(ScratchSlot slot, const Left& left, const Weight& w, const Weight& next) {
  const int64_t half = w.n / 2;
  if (half % kColumns == 0) return multiply_gated(slot, left, w, next);
  float* both = floats(kScratchGateUp, left.m * w.n);
  multiply(left, w, both, false);
  for (int64_t r = 0; r < left.m; ++r)
    for (int64_t i = 0; i < half; i += 16) {
      const int count = static_cast<int>(half - i < 16 ? half - i : 16);
      const float *gate = both + r * w.n + i, *up = gate + half;
      store_n(both + r * half + i, mul(silu(load_n(gate, count)), load_n(up, count)), count);  // behind all reads
    }
  return make_left(slot, both, nullptr, 0, left.m, next);
}

}  // namespace

// residual += o(attention(qkv(norm(residual)))), then += down(gated(norm(residual))).
void decoder_layer(const LayerArgs& a, const LayerInput& in) {
  AttentionArgs attention_args = a.attention;
  static_cast<Batch&>(attention_args) = in.batch;
  const int64_t hidden = a.qkv->k, width = a.o->k;
  const float eps = attention_args.eps;
  int64_t m = attention_args.tokens;
  float* qkv = floats(kScratchQkv, m * a.qkv->n);
  float* attended = floats(kScratchAttended, m * width);
  multiply(make_left(kScratchInput, in.residual, a.input_norm, eps, m, *a.qkv), *a.qkv, qkv, false);
  attention_args.qkv = qkv;
  attention_args.out = attended;
  attention(attention_args);
  if (in.rows != nullptr) {
    m = in.num_rows;
    if (m == 0) return;
    pick_rows(attended, in.rows, m, width, attended);
    pick_rows(in.residual, in.rows, m, hidden, in.residual);
  }
  multiply(make_left(kScratchInput, attended, nullptr, 0, m, *a.o), *a.o, in.residual, true);
  const Left normed = make_left(kScratchInput, in.residual, a.post_norm, eps, m, *a.gate_up);
  multiply(multiply_any_gated(kScratchInner, normed, *a.gate_up, *a.down), *a.down, in.residual, true);
}

void linear(const float* x, const float* norm, float eps, int64_t m, const Weight& w, float* out) {
  multiply(make_left(kScratchInput, x, norm, eps, m, w), w, out, false);
}

void mlp(const float* x, int64_t m, const Weight& gate_up, const Weight& down, float* out) {
  const Left left = make_left(kScratchInput, x, nullptr, 0, m, gate_up);
  multiply(multiply_any_gated(kScratchInner, left, gate_up, down), down, out, false);
}

}  // namespace FD_ISA
}  // namespace fd
