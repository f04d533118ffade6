// bfloat16 linears on AMX tiles.
//
// TDPBF16PS multiplies an input tile (16 rows x 32 k, row-major) with a weight tile (16 k pairs x 16 columns, "VNNI"
// order) into 16 x 16 float32 accumulators. Each element adds its 32 products in an order fixed by the instruction, and
// the k tiles follow in order from 0: an output depends only on its own row and column, for every M. Cutting K into
// blocks stores and reloads float32 accumulators, which changes no bit.
//
// Throughput: one TDPBF16PS per 16 cycles, latency 52, so four accumulators keep the unit busy: a 2 x 2 block uses all
// eight tiles (4 accumulators, 2 of the input, 2 of weights) and loads a tile per multiplication. The bottleneck is:
//   up to 32 rows   memory: the weights are read once, in order, and the loop itself prefetches them
//   beyond          L2: it delivers some 33 bytes a cycle (measured), and a 2 x 2 block that reads both sides from L2
//                   needs 64. So K is cut so that the weights of a block stay in L1 for all rows.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "linear/input_tiles.h"
#include "runtime/amx_tiles.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace amx {
namespace {

constexpr int64_t kStrip = 32;             // rows of a 2 x 2 block
constexpr int64_t kStripFloats = 32 * 32;  // its accumulators
constexpr int64_t kGroup = 2;              // strips that use the same weights before K moves on
// Prefetch distance where memory is the bottleneck: 4 KiB, about what one core reads during the latency of memory.
constexpr int64_t kPrefetchSteps = 2;
// K tiles of a block: their weights (14 KiB) share L1 (48 KiB on every AMX core so far) with the rows.
constexpr int64_t kL1Steps = 7;
// Bytes of input rows, cut to a block of K, that share L2 (2 MiB) with accumulators and the stream of weights.
constexpr int64_t kWholeBudget = int64_t{1} << 20, kCutBudget = int64_t{640} << 10;
constexpr int64_t kMaxRows = 512;
// Bytes of one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

// Tiles of 16 rows, or of m if that is less: a decode step loads no padding.
int64_t tile_rows(int64_t m) { return std::min<int64_t>(m, 16); }

InputTiles new_tiles(ScratchSlot slot, int64_t m, const Weight& w) {
  return InputTiles(slot, m, m <= 16 ? 1 : kStrip, tile_rows(m), w);
}

// accumulators (+)= input x weights over `steps` k tiles, for RowTiles x 2 tiles. `beside` runs once per k tile: while
// the tile unit is busy, the rest of the core fetches weights and finishes earlier results.
template <int RowTiles, typename Beside>
inline void multiply_tiles(const char* a0, const char* a1, int64_t a_step, const char* b0, const char* b1,
                           int64_t steps, Beside& beside) {
  for (int64_t i = 0; i < steps; ++i) {
    beside();
    _tile_loadd(6, b0, 64);
    _tile_loadd(7, b1, 64);
    _tile_loadd(4, a0, 64);
    if (RowTiles == 2) _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (RowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a0 += a_step;
    a1 += a_step;
    b0 += kTileBytes;
    b1 += kTileBytes;
  }
}

// One strip, [32 rows][32 columns] of float32: its accumulators start as zeros (from: null), or as what an earlier
// block of K left in `from`, and end in `to`.
template <int RowTiles, typename Beside>
inline void multiply_strip(const InputTiles& input, int64_t row_tile, int64_t k0, int64_t steps, const char* b0,
                           const char* b1, const float* from, float* to, Beside& beside) {
  constexpr int kStride = 2 * kColumns * 4;
  constexpr int64_t kSecond = 16 * 2 * kColumns;  // row tile
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if (RowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, from, kStride);
    _tile_loadd(1, from + kColumns, kStride);
    if (RowTiles == 2) {
      _tile_loadd(2, from + kSecond, kStride);
      _tile_loadd(3, from + kSecond + kColumns, kStride);
    }
  }
  const char* a0 = input.tile(row_tile, k0);
  const char* a1 = RowTiles == 2 ? input.tile(row_tile + 1, k0) : a0;
  multiply_tiles<RowTiles>(a0, a1, input.step(), b0, b1, steps, beside);
  _tile_stored(0, to, kStride);
  _tile_stored(1, to + kColumns, kStride);
  if (RowTiles == 2) {
    _tile_stored(2, to + kSecond, kStride);
    _tile_stored(3, to + kSecond + kColumns, kStride);
  }
}

// Rows of a pair of column tiles that are complete but not yet written out.
struct Pending {
  const float* c = nullptr;
  int64_t pair = 0, row = 0, end = 0;

  template <typename Finish>
  inline void finish_rows(int64_t count, const Finish& finish) {
    for (const int64_t stop = std::min(end, row + count); row < stop; ++row, c += 2 * kColumns)
      finish(row, pair, load(c), load(c + kColumns));
  }
};

// Prefetches two columns of weights side by side, `lines` of each at a time.
template <_mm_hint Hint>
struct Fetch {
  const char *p0, *p1;
  int64_t lines;

  inline void go() {
    for (int64_t l = 0; l < lines; ++l, p0 += 64, p1 += 64) {
      _mm_prefetch(p0, Hint);
      _mm_prefetch(p1, Hint);
    }
  }
};

// One pass of a block of rows over one block of K.
struct Pass {
  int64_t row0, rows, k0, steps;
  bool first, last;
  float* partial;  // accumulators between blocks of K, [pair][strip][32][32]; null: K is not cut
};

// Calls finish(row, pair, first 16 columns, second 16 columns) for each row of the pass and each pair of the pieces.
template <typename Pairs, typename Finish>
void run_pairs(const InputTiles& input, const Weight& w, const Expansion& expansion, const Pass& pass, Pairs pairs,
               Pieces& pieces, const Finish& finish) {
  const char* weight = static_cast<const char*>(w.data) + pass.k0 * kTileBytes;
  const int64_t column_bytes = w.tile_elements() * 2, steps = pass.steps;
  const int64_t strips = (pass.rows + kStrip - 1) / kStrip;
  const int64_t cuts = strips == 1 ? 1 : (steps + kL1Steps - 1) / kL1Steps;
  const int64_t rows_per_step = (kStrip + steps - 1) / steps;
  alignas(64) float blocks[2][kGroup * kStripFloats];
  int current = 0;
  Pending pending;
  LoraFetch fetch_loras;
  configure_tiles(input.rows);  // fewer than 16 in all: a decode step loads no padding
  for (int64_t begin, end; pieces.next(&begin, &end);) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t t0 = pairs.first(pair), t1 = pairs.second(pair), next = std::min(pair + 1, pairs.count() - 1);
      const char *b0 = weight + t0 * column_bytes, *b1 = weight + t1 * column_bytes;
      // Read while the next pair is computed.
      if (expansion.shrunk != nullptr && strips == 1)
        fetch_loras = expansion.fetch(pass.row0, pass.row0 + pass.rows, t0, t1, steps);
      const char* next0 = weight + pairs.first(next) * column_bytes;
      const char* next1 = weight + pairs.second(next) * column_bytes;
      Fetch<_MM_HINT_T1> fetch_next{next0, next1, (16 + strips - 1) / strips};  // spread over all steps of this pair
      for (int64_t group = 0; group < strips; group += kGroup) {
        const int64_t group_rows = std::min(kGroup * kStrip, pass.rows - group * kStrip);
        float* partial = pass.partial == nullptr ? nullptr : pass.partial + (pair * strips + group) * kStripFloats;
        float* block = blocks[current ^= 1];
        for (int64_t cut = 0; cut < cuts; ++cut) {
          const int64_t k = steps * cut / cuts, count = steps * (cut + 1) / cuts - k;
          const float* from = cut > 0 ? block : pass.first ? nullptr : partial;
          float* to = cut + 1 < cuts || pass.last ? block : partial;
          for (int64_t row = 0; row < group_rows; row += kStrip) {
            auto run = [&](auto beside) {
              const char *here0 = b0 + k * kTileBytes, *here1 = b1 + k * kTileBytes;
              const int64_t row_tile = (pass.row0 + group * kStrip + row) / 16;
              const float* old = from == nullptr ? nullptr : from + row * 32;
              if (group_rows - row > 16) {
                multiply_strip<2>(input, row_tile, pass.k0 + k, count, here0, here1, old, to + row * 32, beside);
              } else {
                multiply_strip<1>(input, row_tile, pass.k0 + k, count, here0, here1, old, to + row * 32, beside);
              }
            };
            if (strips == 1) {
              // Memory is the bound: fetch a fixed distance ahead, across the end of the pair.
              int64_t left_here = std::max<int64_t>(0, steps - kPrefetchSteps);
              const int64_t ahead = (steps - left_here) * kTileBytes;
              Fetch<_MM_HINT_T0> fetch{b0 + ahead, b1 + ahead, 16};
              run([&, fetch, left_here]() mutable {
                if (left_here-- == 0) fetch = {next0, next1, 16};
                fetch.go();
                fetch_loras.go();
                pending.finish_rows(rows_per_step, finish);
              });
            } else {
              run([&] {
                fetch_next.go();
                pending.finish_rows(rows_per_step, finish);
              });
            }
          }
        }
        pending.finish_rows(kGroup * kStrip, finish);
        if (pass.last) pending = {block, pair, pass.row0 + group * kStrip, pass.row0 + group * kStrip + group_rows};
      }
    }
  }
  pending.finish_rows(kGroup * kStrip, finish);
  _mm_sfence();  // streaming stores become visible before the job counts as done
  _tile_release();
}

// t = x @ A.T * scaling for the rows of a run and a tile of ranks. Each element is two chains, of the even and the
// odd k tiles. The other rows of the row tile are computed as well and dropped. Uses tile registers 0, 1 and 4 to 7.
void shrink_run(const InputTiles& input, const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
  const Weight& a = run.lora->a;
  const char* weight = static_cast<const char*>(a.data) + tile * a.tile_elements() * 2;
  alignas(64) float even[256], odd[256];
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < input.k_tiles; k += 2) {
    _tile_loadd(4, input.tile(run.row / 16, k), 64);
    _tile_loadd(6, weight + k * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (k + 1 == input.k_tiles) break;
    _tile_loadd(5, input.tile(run.row / 16, k + 1), 64);
    _tile_loadd(7, weight + (k + 1) * kTileBytes, 64);
    _tile_dpbf16ps(1, 5, 7);
  }
  _tile_stored(0, even, 64);
  _tile_stored(1, odd, 64);
  const Floats16 scaling = load(run.lora->scaling() + tile * 16);
  for (int64_t row = run.row; row < run.row + run.rows; ++row) {
    const int64_t at = row % 16 * 16;
    store(shrunk + row * stride + tile * 16, mul(add(load(even + at), load(odd + at)), scaling));
  }
}

Expansion shrink(const InputTiles& input, int64_t m, const LoraRows& loras) {
  const auto around = [&](const auto& work) {
    configure_tiles(input.rows);
    work();
    _tile_release();
  };
  return shrink_all(loras, m, around, [&](const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
    shrink_run(input, run, tile, shrunk, stride);
  });
}

// Calls finish(row, pair, value of its first tile, value of its second) for every row and every pair of column tiles.
template <typename Pairs, typename Finish>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish) {
  const InputTiles input(rows.data, tile_rows(rows.m), w);
  const Expansion expansion = shrink(input, rows.m, loras);
  const auto finish_sums = [&](int64_t row, int64_t pair, Floats16 c0, Floats16 c1) {
    const Floats16 value0 = complete(w, expansion, row, pairs.first(pair), c0);
    finish(row, pair, value0, complete(w, expansion, row, pairs.second(pair), c1));
  };
  const int64_t k_tiles = input.k_tiles, row_bytes = k_tiles * 64;
  const bool whole = row_bytes * kMaxRows <= kWholeBudget;
  const int64_t row_block = whole ? kMaxRows : kMaxRows / 2;
  for (int64_t row0 = 0; row0 < rows.m; row0 += row_block) {
    Pass pass = {};
    pass.row0 = row0;
    pass.rows = std::min(row_block, rows.m - row0);
    const int64_t passes = whole || pass.rows <= 2 * kStrip ? 1 : (pass.rows * row_bytes + kCutBudget - 1) / kCutBudget;
    if (passes > 1)
      pass.partial = static_cast<float*>(
          scratch(kScratchPartial, static_cast<size_t>(pairs.count() * round_up(pass.rows, kStrip) * 32) * 4));
    for (int64_t p = 0; p < passes; ++p) {
      pass.k0 = k_tiles * p / passes;
      pass.steps = k_tiles * (p + 1) / passes - pass.k0;
      pass.first = p == 0;
      pass.last = p + 1 == passes;
      const int64_t strips = (pass.rows + kStrip - 1) / kStrip;
      const int64_t grain = std::max<int64_t>(1, kPieceBytes / (pass.steps * 2 * kTileBytes * strips));
      parallel_pieces(pairs.count(), grain,
                      [&](Pieces& pieces) { run_pairs(input, w, expansion, pass, pairs, pieces, finish_sums); });
    }
  }
}

}  // namespace

LinearInput make_linear_input(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m,
                              const Weight& w) {
  const InputTiles input = new_tiles(slot, m, w);
  convert_rows(input, x, norm, eps, m, w);
  return {input.data, m};
}

void multiply(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate) {
  store_products(input.m, w, out, accumulate,
                 [&](auto pairs, auto finish, auto) { for_all_pairs(input, w, loras, pairs, finish); });
}

LinearInput multiply_gated(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                           const Weight& next) {
  const InputTiles inner = new_tiles(slot, input.m, next);
  gate_products(input.m, w, inner,
                [&](auto pairs, auto finish, auto) { for_all_pairs(input, w, loras, pairs, finish); });
  return {inner.data, input.m};
}

}  // namespace amx
}  // namespace fd
