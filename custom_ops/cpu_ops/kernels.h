// Declarations of all kernels, one per instruction set. The memory layouts are the same for all of them:
//
// float32 weight   [ceil(N/16)][K][16]              column tile, k, column
// bfloat16 weight  [ceil(N/16)][Kp/32][16][16][2]   column tile, k tile, k pair, column, k within the pair
//                  (Kp = K rounded up to 32; padding is zero). One k tile is one AMX tile of 1 KiB, in the pair-wise
//                  ("VNNI") order of the right operand of TDPBF16PS.
// float32 cache    a block has K [kv head][slot/16][Dp][16], then V [kv head][slot][Dp]
// bfloat16 cache   a block has K [kv head][slot/16][Dp/2][16][2], then V [kv head][slot/2][Dp][2]
//                  (Dp = head_dim rounded up to 32): the right operands of AMX for q @ k.T and p @ v.
//                  A cache of one part has no V: the values are the keys.
// int8 values      [ceil(N/16)][ceil(K/64)] groups of 1,088 bytes: 16 float32 scales, then [16 k quads][16 columns][4]
//                  bytes, each 128 + value (weights/quantize.cc): the right operand of TDPBSUD. Beside the values of a
//                  bfloat16 weight, from which they are made.
// adapters         A as a weight [rank][K]; B by column tile, float32 [rank][16], bfloat16 [rank / 2][16][2]
#pragma once

#include <cstdint>

namespace fd {

constexpr int64_t kColumns = 16;    // columns of a weight tile
constexpr int64_t kDepth = 32;      // k of a bfloat16 tile
constexpr int64_t kInt8Group = 64;  // k that share a scale
constexpr int64_t kInt8GroupBytes = kColumns * 4 + kInt8Group * kColumns;

// An immutable packed weight. Owns its pages and its bias, which is padded to whole tiles.
struct Weight {
  bool bf16;
  int64_t n, k;      // out_features, in_features
  int64_t k_padded;  // k; for bfloat16, rounded up to 32
  int64_t bytes;
  void* data;
  float* bias;  // null or [round_up(n, 16)]
  char* int8;   // null, or the int8 values, which products use then

  int64_t tiles() const { return (n + kColumns - 1) / kColumns; }
  int64_t tile_elements() const { return k_padded * kColumns; }
  int64_t groups() const { return (k + kInt8Group - 1) / kInt8Group; }
  int64_t int8_tile_bytes() const { return groups() * kInt8GroupBytes; }
  int64_t int8_bytes() const { return int8 == nullptr ? 0 : tiles() * int8_tile_bytes(); }
};

// The ranks that a column tile of a linear needs: [first, first + count), both even. Ranks of a projection that has no
// column in the tile are not among them, except to make these numbers even. `b`: where their rows of B begin, in
// elements.
struct LoraTile {
  int32_t first, count;
  int64_t b;
};

// Memory that several adapters of linears share.
struct LoraMemory;

// The adapter of one packed linear: x @ a.T * scaling @ b.T. The ranks of its projections are stacked. One piece of
// memory holds a.data, then b, scaling and tiles. Immutable once packed.
struct Lora {
  Weight a;                                   // [rank, in_features]
  int64_t n;                                  // out_features
  int64_t b_at, scaling_at, tiles_at, bytes;  // offsets from a.data; bytes of all
  LoraMemory* memory;

  char* base() const { return static_cast<char*>(a.data); }
  void* b() const { return base() + b_at; }                                           // in the type of a
  float* scaling() const { return reinterpret_cast<float*>(base() + scaling_at); }    // [round_up(rank, 16)]
  LoraTile* tiles() const { return reinterpret_cast<LoraTile*>(base() + tiles_at); }  // [ceil(n / 16)]
};

// The adapters of the rows of one linear.
struct LoraRows {
  const Lora* const* const* adapters;  // of each adapter, its linears
  const int32_t* rows;                 // the adapter of each row, -1 for none; null: no row has one
  int64_t linear;

  const Lora* of(int64_t row) const { return rows[row] < 0 ? nullptr : adapters[rows[row]][linear]; }
};

// The left operand of a linear: m rows of activations in the layout of its kernels. The data lie in a scratch slot.
struct LinearInput {
  const void* data;
  int64_t m;
};

struct Cache {
  bool bf16;
  int64_t layers, blocks, block_size, kv_heads, head_dim, dim_padded;
  int64_t parts;           // 2: keys and values; 1: keys, which are the values, too
  int64_t block_elements;  // of K (or V) of one block in one layer, all heads
  int64_t bytes;
  void* data;

  // Element offset of a block's first head; which: 0 = K, 1 = V.
  int64_t offset(int64_t layer, int which, int64_t block) const {
    return ((layer * blocks + block) * parts + which) * block_elements;
  }
};

// The token rows of a step, the same for all blocks (AttentionBatch of ops/interface.py).
struct Batch {
  int64_t tokens, sequences, table_width;
  const int32_t *cu_tokens, *starts, *tables, *positions;
};

// The fields of AttentionSpec of ops/blocks.py, in the same order.
struct AttentionSpec {
  int64_t layer, heads, kv_heads, head_dim;
  float scale;
  const float *rope_cos, *rope_sin, *q_norm, *k_norm;
  float norm_eps;
  int64_t interleaved;
  int64_t window;      // 0: a row sees all keys up to its own
  int64_t rotary_dim;  // 0: all dimensions are rotated
  const float* sinks;  // [heads], or null

  int64_t rotated() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
};

// The fields of Activation of ops/blocks.py.
enum Activation : int64_t { kSilu, kGeluTanh, kSwigluClamped };

// One call of attention.
struct AttentionArgs : Batch, AttentionSpec {
  const Cache* cache;
  const float* qkv;
  float* out;
};

enum BlockKind : int64_t { kAttentionBlock, kMlpBlock, kExpertsBlock, kLatentAttentionBlock };

// One of the blocks that a layer is made of. Each adds to the residual: residual += block(RMSNorm(residual)).
struct Block {
  int64_t kind;        // its index in BLOCKS of ops/blocks.py
  int64_t linears;     // how many of its linears may have an adapter
  int64_t ends_layer;  // 1 for the last block of a layer
  const void* fields;  // the structure of its kind (layer.cc)

  bool is_attention() const { return kind == kAttentionBlock || kind == kLatentAttentionBlock; }
};

// A step through all layers, block by block. With `rows` (ascending), the last attention block still completes the
// cache for all tokens, but from its output on only these token rows are computed. With `routing` and experts in the
// last block, these still choose for all rows, and keep `rows` after that. They become the first num_rows rows of the
// residual. Null: all rows.
struct StepArgs {
  Batch batch;
  const Cache* cache;  // its type is that of all weights
  float* residual;     // [tokens, hidden]
  const int64_t* rows;
  int64_t num_rows;
  const Block* blocks;
  int64_t count;
  const Lora* const* const* adapters;  // of each adapter of the step, the linears of all blocks; null without a part
  const int32_t* adapter_rows;         // [tokens], the adapter of each row or -1; null: no row has one
  uint16_t* routing;                   // the experts of each row (Routing of ops/interface.py), or null
  int64_t experts_layers;              // layers with experts
  int64_t forced;                      // 1: steps compute with `routing`; 0: they write it
  int (*between_layers)();  // or null; called at the end of each layer, ends the step by returning anything but 0
};

// The state of a step between two blocks.
struct StepState {
  const Batch& batch;
  const Cache* cache;
  float* residual;  // [m, hidden]
  int64_t m;
  const int64_t* rows;  // for the block that keeps rows: which; null for all other blocks
  int64_t num_rows;
  LoraRows loras;  // of the m rows; loras.linear: the first of the block
  uint16_t* routing;
  int64_t experts_layers, forced;
};

#define FD_DECLARE_KERNELS(isa)                                                                                \
  namespace isa {                                                                                              \
  void run_block(const Block& block, StepState& step);                                                         \
  int64_t block_bytes(int64_t kind);                                                                           \
  void linear(const float* x, const float* norm, float eps, int64_t m, const Weight& w, const LoraRows& loras, \
              float* out);                                                                                     \
  void mlp(const float* x, int64_t m, const Weight& gate_up, const Weight& down, float* out);                  \
  void attention(const AttentionArgs& a);                                                                      \
  }
FD_DECLARE_KERNELS(avx2)
FD_DECLARE_KERNELS(avx512)
FD_DECLARE_KERNELS(avx512_bf16)  // bfloat16 only
FD_DECLARE_KERNELS(amx)          // bfloat16 only
#undef FD_DECLARE_KERNELS

// Arguments of logprobs. A cutoff is the last token that counts, best first and the lower id first among equal logits.
// temperature, cutoff_logits and other_ends may be null. other_ends: the end of each row's part of other_ids.
struct LogprobArgs {
  const int32_t* ids;
  const float* temperature;
  const float* cutoff_logits;
  const int32_t* cutoff_ids;
  const int32_t* other_ids;
  const int64_t* other_ends;
  int64_t top;
  float* chosen;
  int32_t* ranks;
  float* top_values;
  int32_t* top_ids;
  float* other_values;
};

#define FD_DECLARE_VECTOR_KERNELS(isa)                                                                          \
  namespace isa {                                                                                               \
  void embedding(const int32_t* ids, int64_t m, const Weight& w, float* out);                                   \
  void quantize_tile(const Weight& w, int64_t tile);                                                            \
  void prepare_attention(const AttentionArgs& a, void* query, bool bf16);                                       \
  void sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k, \
              const float* top_p, const float* min_p, const double* uniform, const uint32_t* const* allowed,    \
              int32_t* out, float* cutoff_logits, int32_t* cutoff_ids);                                         \
  void logprobs(const float* logits, int64_t rows, int64_t vocab, const LogprobArgs& a);                        \
  void probe_read(const void* data, int64_t bytes); /* reads whole pieces of 64 KiB on all threads */           \
  }
FD_DECLARE_VECTOR_KERNELS(avx2)
FD_DECLARE_VECTOR_KERNELS(avx512)
#undef FD_DECLARE_VECTOR_KERNELS

// Multiplies bfloat16 in registers; returns the operations.
namespace avx512_bf16 {
int64_t probe_peak(int64_t rounds);
}

namespace amx {
int64_t probe_peak(int64_t rounds);
void probe_exp2(const float* x, int64_t n, float* out);  // approximate_math.h
void probe_silu(const float* x, int64_t n, float* out);
}  // namespace amx

// pack.cc: `source` [n, k] becomes columns [first, first + n) of the weight. Throws bad_alloc.
Weight* new_weight(bool bf16, int64_t n, int64_t k, bool with_bias);
void free_weight(Weight* w);
void pack_rows(Weight& w, const void* source, bool source_bf16, int64_t first, int64_t n);
// Columns [first, first + n) of the weight become `target` [n, k] in the type of the weight, with the bits that were
// packed.
void unpack_rows(const Weight& w, void* target, int64_t first, int64_t n);

// pack_lora.cc: a linear of `parts` projections, `rows` [parts] outputs each, with ranks [parts] (0: no adapter).
// Null when there is no memory left.
Lora* new_lora(bool bf16, int64_t k, int64_t parts, const int64_t* rows, const int64_t* ranks, const float* scaling);
void free_lora(Lora* lora);
// Packs a [rank, k] and b [n, rank] of the projection that begins at output first_row and at rank first_rank.
void pack_lora(Lora& lora, const void* a, const void* b, bool source_bf16, int64_t first_row, int64_t n,
               int64_t first_rank, int64_t rank);
// Moves the memory of these adapters to one piece. No op may be using them. False, and nothing has changed, when there
// is no memory left.
bool gather_loras(Lora* const* loras, int64_t count);

}  // namespace fd
