// bfloat16 linears on AMX tiles.
//
// TDPBF16PS multiplies an input tile (16 rows x 32 k, row-major) with a weight tile (16 k pairs x 16 columns, "VNNI"
// order) into 16 x 16 float32 sums. Each element adds its 32 products in an order fixed by the instruction, and the k
// tiles follow in order from 0: an output depends only on its own row and column, for every M. Cutting K stores and
// reloads the float32 sums, which changes no bit.
//
// Throughput: one TDPBF16PS per 16 cycles, latency 52, so blocks of 2 x 2 tiles keep the unit busy: four of sums, two
// of the input, two of weights. A block takes 4 KiB for 4 products. L2 delivers some 50 bytes a cycle.
//
//   up to 32 rows   Memory is the bottleneck: the weights are read once, in order, and the loop itself prefetches them.
//   beyond          L2 is the bottleneck. For a pair of column tiles, the rows go past in blocks of 32. A part of the
//                   weights of the pair stays in L1. The input is loaded with a hint that leaves L1 as it is: else it
//                   would push the weights out. Loading both without the hint takes 1.2 times as long, and so does
//                   keeping all weights of 896 k. Where the input of all rows is larger than L2, K is cut into passes.
//
// Measured with one thread on Emerald Rapids, in ns for each TDPBF16PS of 512 rows of Qwen2.5-0.5B: 5.7 from registers
// alone, 7.0 of these after some ms (the core slows them down); 8.8 for the products of 896 k with nothing beside, 12.1
// with SiLU and the writing of its results; 13.2 for 4,864 k, whose sums wait in memory between four passes.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "linear/input_tiles.h"
#include "linear/tile_blocks.h"
#include "runtime/amx_tiles.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace amx {
namespace {

constexpr int64_t kRowBlock = 32;  // two tiles
// Prefetch distances where memory is the bottleneck. To L1: 4 KiB, about what one core reads during the latency of
// memory. To L2: so many bytes of each column tile further ahead, which reads 1.03 to 1.05 times as fast as L1 alone; 8
// to 32 KiB are equal.
constexpr int64_t kPrefetchSteps = 2, kPrefetchFar = int64_t{16} << 10;
// K tiles of a pair of column tiles that stay in L1 (48 KiB on every AMX core so far): 24 KiB.
constexpr int64_t kKeptSteps = 12;
// k tiles between two pieces of other work, beyond 32 rows. With up to kFewBlocks blocks of rows there are many weights
// to fetch for each product: in short pieces, 48 to 128 rows take 0.89 to 0.94 of the time, and 512 rows 1.03.
constexpr int kFewSteps = 1, kManySteps = 4;
constexpr int64_t kFewBlocks = 4;
// Bytes of input rows, cut to a pass over K, that share L2 (2 MiB) with sums and the stream of weights.
constexpr int64_t kWholeBudget = int64_t{1} << 20, kCutBudget = int64_t{640} << 10;
constexpr int64_t kMaxRows = 512;
// Bytes of one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

// Tiles of 16 rows, or of m if that is less: a decode step loads no padding.
int64_t tile_rows(int64_t m) { return std::min<int64_t>(m, 16); }

InputTiles new_tiles(ScratchSlot slot, int64_t m, const Weight& w) {
  return InputTiles(slot, m, m <= 16 ? 1 : kRowBlock, tile_rows(m), w);
}

// Rows of a pair of column tiles whose sums are complete, but not yet written out.
struct Pending {
  float* sums = nullptr;
  int64_t pair = 0, row = 0, end = 0;

  template <typename Finish>
  inline void finish_rows(int64_t most, const Finish& finish) {
    const int64_t count = std::min(most, end - row);
    if (count <= 0) return;
    finish(row, count, pair, sums);
    row += count;
    sums += count * 2 * kColumns;
  }
};

// Prefetches a pair of column tiles to L2, `lines` of each at a time, until the first one is at its end.
struct FetchPair {
  const char *first, *second, *end;
  int64_t lines;

  inline void go() {
    for (int64_t i = 0; i < lines && first < end; ++i, first += 64, second += 64) {
      _mm_prefetch(first, _MM_HINT_T1);
      _mm_prefetch(second, _MM_HINT_T1);
    }
  }
};

// A block of rows, and the k tiles of a pass over it. A pass reads a part of K that stays in L2 for all rows.
struct Pass {
  int64_t row0, rows, k0, steps;
  bool first, last;
  float* sums;  // between two passes, [pair][row block][32][32]; null: one pass

  int64_t row_blocks() const { return (rows + kRowBlock - 1) / kRowBlock; }
};

// Calls finish (see store_products) for the rows of the pass and the pairs of the pieces.
template <typename Pairs, typename Finish>
void run_few_rows(const InputTiles& input, const Weight& w, const Expansion& expansion, const Pass& pass, Pairs pairs,
                  Pieces& pieces, const Finish& finish) {
  const char* weight = static_cast<const char*>(w.data);
  const int64_t column_bytes = w.tile_elements() * 2, steps = input.k_tiles, end_row = pass.row0 + pass.rows;
  const int64_t rows_per_step = (kRowBlock + steps - 1) / steps;
  alignas(64) float sums[2 * kTileSums];
  Pending pending;
  LoraFetch fetch_loras;
  configure_tiles(input.rows);  // fewer than 16 in all: a decode step loads no padding
  for (int64_t begin, end; pieces.next(&begin, &end);) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t t0 = pairs.first(pair), t1 = pairs.second(pair), next = std::min(pair + 1, pairs.count() - 1);
      const char *b0 = weight + t0 * column_bytes, *b1 = weight + t1 * column_bytes;
      const char *next0 = weight + pairs.first(next) * column_bytes,
                 *next1 = weight + pairs.second(next) * column_bytes;
      // Read while the next pair is computed.
      if (expansion.shrunk != nullptr) fetch_loras = expansion.fetch(pass.row0, end_row, t0, t1, steps);
      // Fetch a fixed distance ahead, across the end of the pair.
      const int64_t left = std::max<int64_t>(0, steps - kPrefetchSteps), ahead = (steps - left) * kTileBytes;
      auto beside = [&, left_here = left, ahead0 = b0 + ahead, ahead1 = b1 + ahead]() mutable {
        if (left_here-- == 0) {
          ahead0 = next0;
          ahead1 = next1;
        }
        for (int64_t i = 0; i < kTileBytes; i += 64) {
          _mm_prefetch(ahead0 + i, _MM_HINT_T0);
          _mm_prefetch(ahead1 + i, _MM_HINT_T0);
          _mm_prefetch(ahead0 + kPrefetchFar + i, _MM_HINT_T1);  // behind the last column tile this does nothing
          _mm_prefetch(ahead1 + kPrefetchFar + i, _MM_HINT_T1);
        }
        ahead0 += kTileBytes;
        ahead1 += kTileBytes;
        fetch_loras.go();
        pending.finish_rows(rows_per_step, finish);
      };
      const char *a0 = input.tile(pass.row0 / 16, 0), *a1 = pass.rows > 16 ? input.tile(pass.row0 / 16 + 1, 0) : a0;
      if (pass.rows > 16) {
        multiply_block<2, 1>(a0, a1, input.step(), b0, b1, steps, steps, nullptr, sums, beside);
      } else {
        multiply_block<1, 1>(a0, a1, input.step(), b0, b1, steps, steps, nullptr, sums, beside);
      }
      pending = {sums, pair, pass.row0, end_row};
    }
  }
  pending.finish_rows(kRowBlock, finish);
  _mm_sfence();  // streaming stores become visible before the job counts as done
  _tile_release();
}

// The same beyond kRowBlock rows, with other work before each `Steps` k tiles. The lines that finish will write are
// fetched to L2 while the block before is computed: all at once, they would keep the tile loads waiting.
template <int Steps, typename Pairs, typename Finish, typename Expect>
void run_many_rows(const InputTiles& input, const Weight& w, const Pass& pass, Pairs pairs, Pieces& pieces,
                   const Finish& finish, const Expect& expect) {
  const char* weight = static_cast<const char*>(w.data) + pass.k0 * kTileBytes;
  const int64_t column_bytes = w.tile_elements() * 2, blocks = pass.row_blocks();
  const int64_t row_tile_bytes = input.k_tiles * kTileBytes, end_row = pass.row0 + pass.rows;
  const int64_t calls = (pass.steps + Steps - 1) / Steps, rows_per_call = (kRowBlock + calls - 1) / calls;
  const int64_t lines = pass.steps * (kTileBytes / 64),
                lines_per_call = (lines + calls * blocks - 1) / (calls * blocks);
  const auto fetch_line = [](const float* line) { _mm_prefetch(line, _MM_HINT_T1); };
  alignas(64) float sums[2 * kTileSums];
  Pending pending;
  configure_tiles(16);
  for (int64_t begin, end; pieces.next(&begin, &end);) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t next = std::min(pair + 1, pairs.count() - 1);
      const char *b0 = weight + pairs.first(pair) * column_bytes, *b1 = weight + pairs.second(pair) * column_bytes;
      const char* next0 = weight + pairs.first(next) * column_bytes;
      FetchPair fetch = {next0, weight + pairs.second(next) * column_bytes, next0 + lines * 64, lines_per_call};
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = pass.row0 + block * kRowBlock;
        const bool last_block = block + 1 == blocks;
        int64_t expected = pass.last ? last_block ? pass.row0 : row + kRowBlock : end_row;
        const int64_t expected_pair = last_block ? next : pair, stop = std::min(expected + kRowBlock, end_row);
        const auto beside = [&]() __attribute__((noinline)) {  // inlined, it takes the registers of the loop around it
          fetch.go();
          for (int64_t i = 0; i < rows_per_call && expected < stop; ++i) expect(expected++, expected_pair, fetch_line);
          pending.finish_rows(rows_per_call, finish);
        };
        float* between = pass.sums == nullptr ? nullptr : pass.sums + (pair * blocks + block) * 2 * kTileSums;
        const char* a = input.tile(row / 16, pass.k0);
        multiply_block<2, Steps>(a, a + row_tile_bytes, kTileBytes, b0, b1, pass.steps, kKeptSteps,
                                 pass.first ? nullptr : between, pass.last ? sums : between, beside);
        if (pass.last) pending = {sums, pair, row, std::min(row + kRowBlock, end_row)};
      }
    }
  }
  pending.finish_rows(kRowBlock, finish);
  _mm_sfence();
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

// Calls finish, and for many rows expect, as store_products describes.
template <typename Pairs, typename Finish, typename Expect>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish,
                   Expect expect) {
  const InputTiles input(rows.data, tile_rows(rows.m), w);
  const Expansion expansion = shrink(input, rows.m, loras);
  const auto finish_sums = [&](int64_t row, int64_t count, int64_t pair, float* sums) {
    complete_rows(w, expansion, row, count, pairs.first(pair), pairs.second(pair), sums);
    finish(row, count, pair, sums);
  };
  const int64_t k_tiles = input.k_tiles, row_bytes = k_tiles * 64;
  const int64_t most = row_bytes * kMaxRows <= kWholeBudget ? kMaxRows : kMaxRows / 2;
  for (int64_t row0 = 0; row0 < rows.m; row0 += most) {
    Pass pass = {row0, std::min(most, rows.m - row0), 0, k_tiles, true, true, nullptr};
    if (pass.rows <= kRowBlock) {
      const int64_t grain = std::max<int64_t>(1, kPieceBytes / (k_tiles * 2 * kTileBytes));
      parallel_pieces(pairs.count(), grain,
                      [&](Pieces& pieces) { run_few_rows(input, w, expansion, pass, pairs, pieces, finish_sums); });
      continue;
    }
    const int64_t bytes = pass.rows * row_bytes;
    const int64_t passes = bytes <= kWholeBudget ? 1 : (bytes + kCutBudget - 1) / kCutBudget;
    if (passes > 1) {
      const int64_t floats = pairs.count() * pass.row_blocks() * 2 * kTileSums;
      pass.sums = static_cast<float*>(scratch(kScratchPartial, static_cast<size_t>(floats) * 4));
    }
    for (int64_t p = 0; p < passes; ++p) {
      pass.k0 = k_tiles * p / passes;
      pass.steps = k_tiles * (p + 1) / passes - pass.k0;
      pass.first = p == 0;
      pass.last = p + 1 == passes;
      const int64_t grain = std::max<int64_t>(1, kPieceBytes / (pass.steps * 4 * kTileBytes * pass.row_blocks()));
      parallel_pieces(pairs.count(), grain, [&](Pieces& pieces) {
        const bool few = pass.row_blocks() <= kFewBlocks;
        const auto run = few ? run_many_rows<kFewSteps, Pairs, decltype(finish_sums), Expect>
                             : run_many_rows<kManySteps, Pairs, decltype(finish_sums), Expect>;
        run(input, w, pass, pairs, pieces, finish_sums, expect);
      });
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
  store_products(input.m, w, out, accumulate, [&](auto... how) { for_all_pairs(input, w, loras, how...); });
}

LinearInput multiply_gated(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                           Activation activation, const Weight& next) {
  const InputTiles inner = new_tiles(slot, input.m, next);
  gate_products(input.m, w, inner, activation, [&](auto... how) { for_all_pairs(input, w, loras, how...); });
  return {inner.data, input.m};
}

}  // namespace amx
}  // namespace fd
