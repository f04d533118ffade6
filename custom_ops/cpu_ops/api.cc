// The library's C interface (called through ctypes, fastdeploy/model_executor/ops/cpu_library.py). Pointers are
// addresses, shapes are checked by the caller. An op returns 0, -1 when memory ran out, or -2 when something else
// failed. Then fd_last_error returns the message.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>

#include "attention/tasks.h"
#include "kernels.h"
#include "runtime/cpu_features.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"
#include "weights/staging.h"

using namespace fd;

namespace {

thread_local char last_error[256] = "";

template <typename Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  } catch (const std::exception& error) {
    std::snprintf(last_error, sizeof(last_error), "%s", error.what());
    return -2;
  }
}

bool wide() { return current_isa() >= Isa::kAvx512; }

}  // namespace

#define FD_VECTOR(kernel, ...) guarded([&] { wide() ? avx512::kernel(__VA_ARGS__) : avx2::kernel(__VA_ARGS__); })
#define FD_MATRIX(bf16, kernel, ...)                                                            \
  guarded([&] {                                                                                 \
    if ((bf16) && current_isa() >= Isa::kAvx512Bf16) {                                          \
      current_isa() == Isa::kAmx ? amx::kernel(__VA_ARGS__) : avx512_bf16::kernel(__VA_ARGS__); \
    } else {                                                                                    \
      wide() ? avx512::kernel(__VA_ARGS__) : avx2::kernel(__VA_ARGS__);                         \
    }                                                                                           \
  })

extern "C" {

const char* fd_build_stamp() { return FD_BUILD_STAMP; }

// The size of a structure that the caller declares as well, by its number in STRUCTS (cpu_library.py); 0: unknown.
int64_t fd_sizeof(int64_t number) {
  constexpr int64_t kSizes[] = {sizeof(AttentionSpec), sizeof(Block),     sizeof(StepArgs),
                                sizeof(StageItem),     sizeof(DeltaItem), sizeof(StageResult)};
  constexpr int64_t kCount = std::size(kSizes);
  return number < kCount ? kSizes[number] : avx2::block_bytes(number - kCount);
}

// The message of the last op on this thread that returned -2.
const char* fd_last_error() { return last_error; }

int fd_isa() { return static_cast<int>(current_isa()); }
int fd_set_isa(int isa) { return static_cast<int>(set_isa(static_cast<Isa>(isa))); }
int fd_num_threads() { return num_threads(); }
void fd_set_num_threads(int n) { set_num_threads(n); }

void fd_free_scratch() {
  end_workers();
  free_scratch();
}

Weight* fd_new_weight(int bf16, int64_t n, int64_t k, int with_bias) { return new_weight(bf16, n, k, with_bias); }
void fd_free_weight(Weight* w) { free_weight(w); }
int64_t fd_weight_bytes(const Weight* w) {
  return w->bytes + w->int8_bytes() + (w->bias != nullptr ? w->tiles() * kColumns * 4 : 0);
}

int fd_pack_rows(Weight* w, const void* source, int source_bf16, int64_t first, int64_t n) {
  return guarded([&] { pack_rows(*w, source, source_bf16, first, n); });
}

int fd_stage(int bf16, const StageItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  return guarded([&] { stage(bf16, items, count, stop, results); });
}

int fd_apply_deltas(int bf16, const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  return guarded([&] { apply_deltas(bf16, items, count, stop, results); });
}

int fd_copy_rows(Weight* target, const Weight* source, int64_t first, int64_t last) {
  return guarded([&] { copy_rows(*target, *source, first, last); });
}

int fd_quantize(Weight* const* weights, int64_t count, const int32_t* stop) {
  return guarded([&] { quantize(weights, count, stop); });
}

void fd_set_bias(Weight* w, const float* bias, int64_t first, int64_t n) {
  std::memcpy(w->bias + first, bias, static_cast<size_t>(n) * 4);
}

void fd_unpack_rows(const Weight* w, void* target, int64_t first, int64_t n) { unpack_rows(*w, target, first, n); }

void fd_get_bias(const Weight* w, float* bias) { std::memcpy(bias, w->bias, static_cast<size_t>(w->n) * 4); }

Lora* fd_new_lora(int bf16, int64_t k, int64_t parts, const int64_t* rows, const int64_t* ranks, const float* scaling) {
  return new_lora(bf16, k, parts, rows, ranks, scaling);
}
void fd_free_lora(Lora* lora) { free_lora(lora); }
int64_t fd_lora_bytes(const Lora* lora) { return lora->bytes; }
int fd_pack_lora(Lora* lora, const void* a, const void* b, int source_bf16, int64_t first_row, int64_t n,
                 int64_t first_rank, int64_t rank) {
  return guarded([&] { pack_lora(*lora, a, b, source_bf16, first_row, n, first_rank, rank); });
}
int fd_gather_loras(Lora* const* loras, int64_t count) { return gather_loras(loras, count) ? 0 : -1; }

// Returns 1 if between_layers ended the step.
int fd_run_layers(const StepArgs* s) {
  const int64_t last = s->count - 1;
  int64_t keeping = last;  // the block that keeps s->rows
  if (s->routing == nullptr || s->blocks[last].kind != kExpertsBlock)
    while (keeping > 0 && !s->blocks[keeping].is_attention()) --keeping;
  StepState step = {s->batch,
                    s->cache,
                    s->residual,
                    s->batch.tokens,
                    nullptr,
                    s->num_rows,
                    {s->adapters, s->adapter_rows, 0},
                    s->routing,
                    s->experts_layers,
                    s->forced};
  for (int64_t i = 0, linear = 0; i < s->count; linear += s->blocks[i++].linears) {
    step.rows = i == keeping ? s->rows : nullptr;
    step.loras.linear = linear;
    if (const int status = FD_MATRIX(s->cache->bf16, run_block, s->blocks[i], step)) return status;
    if (s->blocks[i].ends_layer && s->between_layers != nullptr && s->between_layers() != 0) return 1;
  }
  return 0;
}

// norm: null, or the weight of an RMSNorm of x. adapter_rows: null, or the adapter of each row, -1 for none; then
// adapters are addresses of the adapters' Lora.
int fd_linear(const float* x, const float* norm, float eps, int64_t m, const Weight* w,
              const Lora* const* const* adapters, const int32_t* adapter_rows, float* out) {
  const LoraRows loras = {adapters, adapter_rows, 0};
  return FD_MATRIX(w->bf16, linear, x, norm, eps, m, *w, loras, out);
}

int fd_mlp(const float* x, int64_t m, const Weight* gate_up, const Weight* down, float* out) {
  return FD_MATRIX(gate_up->bf16, mlp, x, m, *gate_up, *down, out);
}

int fd_embedding(const int32_t* ids, int64_t m, const Weight* w, float* out) {
  return FD_VECTOR(embedding, ids, m, *w, out);
}

// parts: see Cache.
Cache* fd_new_cache(int bf16, int64_t layers, int64_t blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
                    int64_t parts) {
  auto* c =
      new (std::nothrow) Cache{bf16 != 0, layers, blocks, block_size, kv_heads, head_dim, 0, parts, 0, 0, nullptr};
  if (c == nullptr) return nullptr;
  c->dim_padded = round_up(head_dim, bf16 ? 32 : 16);
  c->block_elements = kv_heads * block_size * c->dim_padded;
  c->bytes = layers * parts * blocks * c->block_elements * (bf16 ? 2 : 4);
  c->data = allocate_pages(static_cast<size_t>(c->bytes));
  if (c->data == nullptr) {
    delete c;
    return nullptr;
  }
  return c;
}

void fd_free_cache(Cache* c) {
  if (c == nullptr) return;
  free_pages(c->data, static_cast<size_t>(c->bytes));
  delete c;
}

int64_t fd_cache_bytes(const Cache* c) { return c->bytes; }

void fd_copy_blocks(Cache* c, const int32_t* sources, const int32_t* targets, int64_t pairs) {
  const int64_t element = c->bf16 ? 2 : 4, bytes = c->parts * c->block_elements * element;
  char* data = static_cast<char*>(c->data);
  for (int64_t i = 0; i < pairs; ++i)
    for (int64_t layer = 0; layer < c->layers; ++layer)
      std::memmove(data + c->offset(layer, 0, targets[i]) * element, data + c->offset(layer, 0, sources[i]) * element,
                   static_cast<size_t>(bytes));
}

int fd_attention(const Batch* b, const AttentionSpec* s, const Cache* c, const float* qkv, float* out) {
  return FD_MATRIX(c->bf16, attention, {*b, *s, c, qkv, out});
}

// The number of tasks that fd_attention makes of a batch.
int fd_attention_tasks(const Batch* b, const AttentionSpec* s, const Cache* c, int64_t* count) {
  return guarded([&] { *count = make_tasks({*b, *s, c, nullptr, nullptr}).count; });
}

// allowed: null, or for each row null or the bits of the ids that may be drawn. cutoff_logits may be null; see
// fd::LogprobArgs for what a cutoff is.
int fd_sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k,
              const float* top_p, const float* min_p, const double* uniform, const uint32_t* const* allowed,
              int32_t* out, float* cutoff_logits, int32_t* cutoff_ids) {
  return FD_VECTOR(sample, logits, rows, vocab, temperature, top_k, top_p, min_p, uniform, allowed, out, cutoff_logits,
                   cutoff_ids);
}

int fd_logprobs(const float* logits, int64_t rows, int64_t vocab, const fd::LogprobArgs* args) {
  return FD_VECTOR(logprobs, logits, rows, vocab, *args);
}

int fd_probe_read(const Weight* w) { return FD_VECTOR(probe_read, w->data, w->bytes); }

// The probe of the peak needs avx512_bf16, the others amx.
int64_t fd_probe_peak(int64_t rounds) {
  return current_isa() == Isa::kAmx ? amx::probe_peak(rounds) : avx512_bf16::probe_peak(rounds);
}
void fd_probe_exp2(const float* x, int64_t n, float* out) { amx::probe_exp2(x, n, out); }
void fd_probe_silu(const float* x, int64_t n, float* out) { amx::probe_silu(x, n, out); }

}  // extern "C"
