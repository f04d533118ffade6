// A mixture of experts. Compiled once per instruction set.
//
// The rows of a step are grouped by expert, so that each chosen expert is read once, and computes its rows with the
// kernels of linear.h. These give a row the same bits whatever other rows they compute. The results of a row are added
// in the order of its choice.
//
// Throughput: one thread computes a whole expert, so that a layer needs no barrier between experts. Only the experts
// that are left over when they are divided among the threads are computed by all threads together, one after the other.
#include "experts/experts.h"

#include <algorithm>
#include <cstring>

#include "experts/router.h"
#include "keep_rows.h"
#include "linear/products.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kRoutedRows = 8;  // of a piece of work

// normed = RMSNorm(x), [m, hidden].
void norm_rows(const float* x, const float* norm, float eps, int64_t m, int64_t hidden, float* normed) {
  parallel_for(m, std::max<int64_t>(1, 16384 / hidden), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = x + r * hidden;
      const Floats16 factor = set1(norm_factor(from, hidden, eps));
      for (int64_t i = 0; i < hidden; i += 16)
        store(normed + r * hidden + i, mul(mul(load(from + i), factor), load(norm + i)));
    }
  });
}

// The chosen experts of all rows. A slot is a row's choice: row * top_k + its rank. Slots are sorted by expert, then in
// order. All arrays lie in one piece of scratch.
struct Chosen {
  int64_t top_k, slots;
  float* weights;     // of each slot
  uint16_t* experts;  // of each slot
  int32_t* sorted;    // slots
  int32_t* place;     // of each slot in `sorted`
  int32_t* begins;    // [experts + 1], of each expert in `sorted`
  int32_t* active;    // the experts that have slots, those with the most first
  int64_t num_active;

  Chosen(int64_t m, int64_t top_k, int64_t num_experts) : top_k(top_k), slots(m * top_k), num_active(0) {
    const int64_t words = 4 * slots + 2 * num_experts + 1;
    auto* memory = static_cast<int32_t*>(scratch(kScratchRouting, static_cast<size_t>(words) * 4));
    weights = reinterpret_cast<float*>(memory);
    sorted = memory + slots;
    place = sorted + slots;
    begins = place + slots;
    active = begins + num_experts + 1;
    experts = reinterpret_cast<uint16_t*>(active + num_experts);
  }

  void keep(const int64_t* rows, int64_t count) {
    slots = count * top_k;
    pick_rows(weights, rows, count, top_k);
    pick_rows(experts, rows, count, top_k);
  }

  void sort(int64_t num_experts) {
    std::fill_n(begins, num_experts + 1, 0);
    for (int64_t s = 0; s < slots; ++s) ++begins[experts[s] + 1];
    for (int64_t e = 0; e < num_experts; ++e) {
      if (begins[e + 1] > 0) active[num_active++] = static_cast<int32_t>(e);
      begins[e + 1] += begins[e];
    }

    auto* cursor = reinterpret_cast<int32_t*>(scratch(kScratchExpertRows, static_cast<size_t>(num_experts) * 4));
    std::copy_n(begins, num_experts, cursor);
    for (int64_t s = 0; s < slots; ++s) {
      const int32_t at = cursor[experts[s]]++;
      sorted[at] = static_cast<int32_t>(s);
      place[s] = at;
    }
    std::stable_sort(active, active + num_active, [&](int32_t a, int32_t b) { return rows_of(a) > rows_of(b); });
  }

  int64_t rows_of(int64_t expert) const { return begins[expert + 1] - begins[expert]; }
};

void choose(const ExpertsBlock& block, const StepState& step, const float* logits, Chosen& chosen) {
  const int64_t experts = block.router->n, k = chosen.top_k;
  const bool forced = step.routing != nullptr && step.forced;
  parallel_for(step.m, kRoutedRows, [&](int64_t begin, int64_t end) {
    Router router(block.routing, experts, floats(kScratchExpertRows, Router::floats_of(experts)));
    for (int64_t r = begin; r < end; ++r) {
      uint16_t* of_row = chosen.experts + r * k;
      uint16_t* told = nullptr;
      if (step.routing != nullptr) told = step.routing + (r * step.experts_layers + block.routing.place) * k;
      if (forced) std::copy_n(told, k, of_row);
      router.choose(logits + r * experts, forced, of_row, chosen.weights + r * k);
      if (told != nullptr && !forced) std::copy_n(of_row, k, told);
    }
  });
}

// out [rows of the expert, hidden] = the expert of its rows. Runs on one thread or, outside of a job, on all.
void run_expert(const ExpertsBlock& block, const Chosen& chosen, int64_t expert, const float* normed, float* outputs) {
  const int64_t hidden = block.gate_up->k, first = chosen.begins[expert], rows = chosen.rows_of(expert);
  const Weight gate_up = columns_of(*block.gate_up, expert * 2 * block.down->k, 2 * block.down->k);
  const Weight down = columns_of(*block.down, expert * hidden, hidden);
  float* gathered = floats(kScratchExpertRows, rows * hidden);
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(gathered + i * hidden, normed + chosen.sorted[first + i] / chosen.top_k * hidden,
                static_cast<size_t>(hidden) * 4);
  const LinearInput input = input_of(kScratchExpertInput, gathered, nullptr, 0, rows, gate_up);
  const LinearInput inner = gated_product(kScratchExpertInner, input, gate_up, {}, block.activation, down);
  product(inner, down, {}, outputs + first * hidden, false);
}

// The outputs of the chosen experts, [slots, hidden] in the order of chosen.sorted.
float* run_experts(const ExpertsBlock& block, const Chosen& chosen, const float* normed) {
  float* outputs = floats(kScratchExpertOutput, chosen.slots * block.gate_up->k);
  const int64_t threads = num_threads(), left_over = chosen.num_active % threads;
  // Many experts are divided evenly enough.
  const int64_t together = chosen.num_active < 8 * threads ? left_over : 0;
  for (int64_t i = 0; i < together; ++i) run_expert(block, chosen, chosen.active[i], normed, outputs);
  parallel_for(chosen.num_active - together, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_expert(block, chosen, chosen.active[together + i], normed, outputs);
  });
  return outputs;
}

// residual += the weighted sum of the outputs of each row + shared.
void add_outputs(const Chosen& chosen, const float* outputs, const float* shared, int64_t hidden,
                 const StepState& step) {
  const int64_t k = chosen.top_k;
  parallel_for(step.m, std::max<int64_t>(1, 16384 / (k * hidden)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < hidden; i += 16) {
        Floats16 sum = zero();
        for (int64_t s = r * k; s < (r + 1) * k; ++s)
          sum = fma(set1(chosen.weights[s]), load(outputs + chosen.place[s] * hidden + i), sum);
        if (shared != nullptr) sum = add(sum, load(shared + r * hidden + i));
        float* to = step.residual + r * hidden + i;
        store(to, add(load(to), sum));
      }
  });
}

}  // namespace

void experts_block(const ExpertsBlock& block, StepState& step) {
  if (step.m == 0) return;
  const int64_t hidden = block.router->k, experts = block.router->n;
  float* normed = floats(kScratchNormed, step.m * hidden);
  norm_rows(step.residual, block.norm, block.norm_eps, step.m, hidden, normed);
  float* logits = floats(kScratchRouter, step.m * experts);
  product(input_of(kScratchInput, normed, nullptr, 0, step.m, *block.router), *block.router, {}, logits, false);
  Chosen chosen(step.m, block.routing.top_k, experts);
  choose(block, step, logits, chosen);
  if (step.rows != nullptr) chosen.keep(step.rows, step.num_rows);
  keep_rows(step, hidden, normed, hidden);
  if (step.m == 0) return;
  chosen.sort(experts);
  float* shared = nullptr;
  if (block.shared_gate_up != nullptr) {
    shared = floats(kScratchOutput, step.m * hidden);
    const LinearInput input = input_of(kScratchInput, normed, nullptr, 0, step.m, *block.shared_gate_up);
    const LinearInput inner =
        gated_product(kScratchInner, input, *block.shared_gate_up, {}, block.activation, *block.shared_down);
    product(inner, *block.shared_down, {}, shared, false);
  }
  add_outputs(chosen, run_experts(block, chosen, normed), shared, hidden, step);
}

}  // namespace FD_ISA
}  // namespace fd
