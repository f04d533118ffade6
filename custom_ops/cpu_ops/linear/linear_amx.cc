// bfloat16 linears on AMX tiles.
//
// TDPBF16PS multiplies an input tile (16 rows x 32 k, row-major) with a weight tile (16 k pairs x 16 columns, "VNNI"
// order) into 16 x 16 float32 sums. Each element adds its 32 products in an order fixed by the instruction, and the k
// tiles follow in order from 0: an output depends only on its own row and column, for every M. Cutting K stores and
// reloads the float32 sums, which changes no bit.
//
// Throughput: one TDPBF16PS per 16 cycles, latency 52, so four sums keep the unit busy. A tile (1 KiB) is loaded from
// L1 in 8 cycles. L2 delivers some 33 bytes a cycle (measured): 528 bytes in the time of a product.
//
//   up to 32 rows   Memory is the bottleneck: the weights are read once, in order, and the loop itself prefetches them.
//                   Blocks of 2 x 2 tiles: 4 of sums, 2 of the input, 2 of weights.
//   beyond          L2 is the bottleneck. K is cut, so that the weights of four column tiles stay in L1 for all rows.
//                   The rows go past them in blocks of 1 x 4 tiles. A product takes from L2, with cuts of 7 k tiles and
//                   512 rows:
//                     input     1 KiB for 4 products                              256 bytes
//                     weights   28 KiB once for the 32 x 28 products of a cut      32
//                     sums      4 KiB for the 28 products of a block              146, and as many written back
//                   These are 434 bytes read and 146 written: 13 to 18 cycles, depending on what the writes cost.
//                   L1 needs 11 cycles for the loads of a product.
//
// In a simulation of an L1 of 48 KiB and 12 ways, with its sets and with results that are written out, gate and up of
// 896 k take 492 + 120 bytes. Blocks of 2 x 2 tiles with 64 rows per cut take 859 + 91. Of all blocks of up to six
// tiles, only 1 x 4 with cuts of 2 k tiles and 64 rows per cut come near (529 + 16), but their loads and those of sums
// need 14 cycles of L1. L1 is nearly full: prefetches of input and sums to L1 push weights out, and double the bytes.
//
// Measured on Emerald Rapids (two threads, a peak of 5.1 TFLOP/s), products of 512 to 4,096 rows: gate/up and down of
// Qwen2.5-0.5B reach 1.2 to 1.5 TFLOP/s, 54 to 68 cycles for each TDPBF16PS; qkv and o 0.5 to 0.8 TFLOP/s, 102 to 163
// cycles. The account above explains 18 of these at most. So it leaves out what costs the most.
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

constexpr int64_t kFewRows = 32;  // two tiles
// Prefetch distance where memory is the bottleneck: 4 KiB, about what one core reads during the latency of memory.
constexpr int64_t kPrefetchSteps = 2;
// K tiles of a cut: their weights (28 KiB) share L1 (48 KiB on every AMX core so far) with the rows and sums that go
// past.
constexpr int64_t kCutSteps = 7;
constexpr int64_t kBlockFloats = 2 * 16 * 32;  // sums of a block of 1 x 4 tiles
// Bytes of input rows, cut to a pass over K, that share L2 (2 MiB) with sums and the stream of weights.
constexpr int64_t kWholeBudget = int64_t{1} << 20, kCutBudget = int64_t{640} << 10;
constexpr int64_t kMaxRows = 512;
// Bytes of one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

// Tiles of 16 rows, or of m if that is less: a decode step loads no padding.
int64_t tile_rows(int64_t m) { return std::min<int64_t>(m, 16); }

InputTiles new_tiles(ScratchSlot slot, int64_t m, const Weight& w) {
  return InputTiles(slot, m, m <= 16 ? 1 : kFewRows, tile_rows(m), w);
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

// Prefetches four column tiles side by side to L2, `lines` of each at a time, until the first one is at its end.
struct FetchColumns {
  Columns at;
  const char* end;
  int64_t lines;

  inline void go() {
    for (int64_t i = 0; i < lines && at.tile[0] < end; ++i)
      for (const char*& next : at.tile) {
        _mm_prefetch(next, _MM_HINT_T1);
        next += 64;
      }
  }
};

// Memory for the sums of `count` blocks of 1 x 4 tiles.
float* tile_sums(ScratchSlot slot, int64_t count) {
  return static_cast<float*>(scratch(slot, static_cast<size_t>(count * kBlockFloats) * 4));
}

// A block of rows, and the k tiles of a pass over it. A pass reads a part of K that stays in L2 for all rows.
struct Pass {
  int64_t row0, rows, k0, steps;
  bool first, last;
  float* sums;  // between two passes, [group][row tile][2 pairs][16][32]; null: one pass

  int64_t row_tiles() const { return (rows + 15) / 16; }
};

// Calls finish(row, pair, first 16 columns, second 16 columns) for each row of the pass and each pair of the pieces.
template <typename Pairs, typename Finish>
void run_few_rows(const InputTiles& input, const Weight& w, const Expansion& expansion, const Pass& pass, Pairs pairs,
                  Pieces& pieces, const Finish& finish) {
  const char* weight = static_cast<const char*>(w.data);
  const int64_t column_bytes = w.tile_elements() * 2, steps = input.k_tiles, end_row = pass.row0 + pass.rows;
  const int64_t rows_per_step = (kFewRows + steps - 1) / steps;
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
      const auto beside = [&, left_here = left, ahead0 = b0 + ahead, ahead1 = b1 + ahead]() mutable {
        if (left_here-- == 0) {
          ahead0 = next0;
          ahead1 = next1;
        }
        for (int64_t i = 0; i < kTileBytes; i += 64) {
          _mm_prefetch(ahead0 + i, _MM_HINT_T0);
          _mm_prefetch(ahead1 + i, _MM_HINT_T0);
        }
        ahead0 += kTileBytes;
        ahead1 += kTileBytes;
        fetch_loras.go();
        pending.finish_rows(rows_per_step, finish);
      };
      if (pass.rows > 16) {
        multiply_few<2>(input, pass.row0 / 16, b0, b1, sums, beside);
      } else {
        multiply_few<1>(input, pass.row0 / 16, b0, b1, sums, beside);
      }
      pending = {sums, pair, pass.row0, end_row};
    }
  }
  pending.finish_rows(kFewRows, finish);
  _mm_sfence();  // streaming stores become visible before the job counts as done
  _tile_release();
}

// The same for many rows. A piece is a range of groups of two pairs. expect(row, pair) is called some time before
// finish. If the number of pairs is odd, the last one is computed twice.
template <typename Pairs, typename Finish, typename Expect>
void run_many_rows(const InputTiles& input, const Weight& w, const Pass& pass, Pairs pairs, Pieces& pieces,
                   const Finish& finish, const Expect& expect) {
  const char* weight = static_cast<const char*>(w.data) + pass.k0 * kTileBytes;
  const int64_t column_bytes = w.tile_elements() * 2, row_tiles = pass.row_tiles(), last_pair = pairs.count() - 1;
  const int64_t cuts = (pass.steps + kCutSteps - 1) / kCutSteps;
  float* own = pass.sums == nullptr ? tile_sums(kScratchTiles, row_tiles) : nullptr;  // between two cuts
  const auto columns_of = [&](int64_t group) {
    const int64_t p0 = std::min(2 * group, last_pair / 2 * 2), p1 = std::min(p0 + 1, last_pair);
    const auto at = [&](int64_t tile) { return weight + tile * column_bytes; };
    return Columns{{at(pairs.first(p0)), at(pairs.second(p0)), at(pairs.first(p1)), at(pairs.second(p1))}};
  };
  const auto cut_at = [&](int64_t cut) { return pass.steps * cut / cuts; };
  alignas(64) float block[kBlockFloats];  // complete sums
  Pending pending[2];
  configure_tiles(16);
  for (int64_t begin, end; pieces.next(&begin, &end);) {
    for (int64_t group = begin; group < end; ++group) {
      const Columns columns = columns_of(group), following = columns_of(group + 1);
      const int64_t pair = 2 * group, group_pairs = std::min<int64_t>(2, pairs.count() - pair);
      float* sums = pass.sums == nullptr ? own : pass.sums + group * row_tiles * kBlockFloats;
      for (int64_t cut = 0; cut < cuts; ++cut) {
        const int64_t k = cut_at(cut), steps = cut_at(cut + 1) - k, rows_per_step = (16 + steps - 1) / steps;
        const bool zero = pass.first && cut == 0, last_cut = cut + 1 == cuts, done = pass.last && last_cut;
        // Fetch the next cut, or the first one of the following group, over all row tiles.
        const int64_t next_k = last_cut ? 0 : k + steps, next_end = cut_at(last_cut ? 1 : cut + 2);
        const int64_t calls = row_tiles * steps, lines = (next_end - next_k) * (kTileBytes / 64);
        FetchColumns fetch = {last_cut ? following : columns, nullptr, (lines + calls - 1) / calls};
        for (const char*& next : fetch.at.tile) next += next_k * kTileBytes;
        fetch.end = fetch.at.tile[0] + lines * 64;
        const auto beside = [&] {
          fetch.go();
          for (Pending& rows : pending) rows.finish_rows(rows_per_step, finish);
        };
        for (int64_t tile = 0; tile < row_tiles; ++tile) {
          const int64_t row = pass.row0 + tile * 16, end_row = std::min(row + 16, pass.row0 + pass.rows);
          for (int64_t i = 0; done && i < group_pairs; ++i)
            for (int64_t r = row; r < end_row; ++r) expect(r, pair + i);
          float *kept = sums + tile * kBlockFloats, *to = done ? block : kept;
          multiply_block(input.tile(row / 16, pass.k0 + k), columns, k * kTileBytes, steps, zero ? nullptr : kept, to,
                         beside);
          for (int64_t i = 0; done && i < group_pairs; ++i)
            pending[i] = {block + i * kTileSums, pair + i, row, end_row};
        }
      }
    }
  }
  for (Pending& rows : pending) rows.finish_rows(16, finish);
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

// Calls expect(row, pair), for many rows, then finish(row, pair, value of its first tile, value of its second) for
// every row and every pair of column tiles.
template <typename Pairs, typename Finish, typename Expect>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish,
                   Expect expect) {
  const InputTiles input(rows.data, tile_rows(rows.m), w);
  const Expansion expansion = shrink(input, rows.m, loras);
  const auto finish_sums = [&](int64_t row, int64_t pair, Floats16 c0, Floats16 c1) {
    const Floats16 value0 = complete(w, expansion, row, pairs.first(pair), c0);
    finish(row, pair, value0, complete(w, expansion, row, pairs.second(pair), c1));
  };
  const int64_t k_tiles = input.k_tiles, row_bytes = k_tiles * 64, groups = (pairs.count() + 1) / 2;
  const int64_t row_block = row_bytes * kMaxRows <= kWholeBudget ? kMaxRows : kMaxRows / 2;
  for (int64_t row0 = 0; row0 < rows.m; row0 += row_block) {
    Pass pass = {row0, std::min(row_block, rows.m - row0), 0, k_tiles, true, true, nullptr};
    if (pass.rows <= kFewRows) {
      const int64_t grain = std::max<int64_t>(1, kPieceBytes / (k_tiles * 2 * kTileBytes));
      parallel_pieces(pairs.count(), grain,
                      [&](Pieces& pieces) { run_few_rows(input, w, expansion, pass, pairs, pieces, finish_sums); });
      continue;
    }
    const int64_t bytes = pass.rows * row_bytes;
    const int64_t passes = bytes <= kWholeBudget || pass.rows <= 64 ? 1 : (bytes + kCutBudget - 1) / kCutBudget;
    if (passes > 1) pass.sums = tile_sums(kScratchPartial, groups * pass.row_tiles());
    for (int64_t p = 0; p < passes; ++p) {
      pass.k0 = k_tiles * p / passes;
      pass.steps = k_tiles * (p + 1) / passes - pass.k0;
      pass.first = p == 0;
      pass.last = p + 1 == passes;
      const int64_t grain = std::max<int64_t>(1, kPieceBytes / (pass.steps * 2 * kTileBytes * pass.row_tiles()));
      parallel_pieces(groups, grain,
                      [&](Pieces& pieces) { run_many_rows(input, w, pass, pairs, pieces, finish_sums, expect); });
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
