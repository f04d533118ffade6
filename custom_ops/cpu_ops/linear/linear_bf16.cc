// bfloat16 linears with VDPBF16PS, for CPUs that have AVX512_BF16 and no AMX.
//
// VDPBF16PS adds a pair of products to each of 16 float32 lanes, as two fused multiply-adds, the odd element of the
// pair first. So every output element is one chain over k = 1, 0, 3, 2, 5, 4, ...: its bits depend only on its own row
// of x and its own column of the weight. The instruction rounds to nearest even, takes denormal numbers as 0 and
// flushes denormal results to 0, whatever MXCSR says; VCVTNE2PS2BF16, which rounds the input, does so, too.
//
// Throughput: two VDPBF16PS per cycle with a latency of 6 (Zen 5; others one), so 12 chains keep the units busy. A
// strip of 12 rows x 2 column tiles takes 24 accumulators, 2 registers of weights and 1 of input, and loads 14 vectors
// for 24 multiplications. K is cut, so that the weights of a cut stay in L1 for all strips of a block of rows, while
// the next cut is prefetched. Up to some 24 rows memory is the bottleneck: the weights are read once, in order.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "linear/input_tiles.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace avx512_bf16 {
namespace {

constexpr int64_t kStrip = 12;
constexpr int64_t kBlockStrips = 22;  // strips of a block of rows: 264 rows of q05 (hidden 896) take half of L2
// K tiles of a cut: the weights of two cuts, 20 KiB, share L1 with the rows of a strip. 4 to 14 are as fast (Zen 5).
constexpr int64_t kCutSteps = 5;
constexpr int64_t kLoraRows = 32;       // rows of which the adapters are prefetched
constexpr int kShrinkRows = 4;          // rows that share a pass over A
constexpr int64_t kShrinkAhead = 2048;  // bytes of A that are prefetched ahead
constexpr int64_t kParts = 4;           // parts of a step, with prefetches before each
// Bytes of one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

int64_t strips_of(int64_t m) { return std::max<int64_t>(1, (m + kStrip - 1) / kStrip); }

// Rows of a row tile, which is a strip: strips of the same height, up to 12.
int64_t tile_rows(int64_t m) { return std::max<int64_t>(1, (m + strips_of(m) - 1) / strips_of(m)); }

InputTiles new_tiles(ScratchSlot slot, int64_t m, const Weight& w) {
  return InputTiles(slot, m, tile_rows(m), tile_rows(m), w);
}

// Prefetches what the next multiplications need, a few lines at a time: the next cut of two column tiles, the rows of
// the next strip, and adapters. With one strip, the cut after the next one is fetched to L2 as well: there memory is
// the bottleneck, and the core's own prefetcher falls behind at each end of a pair, where results and adapters are
// touched (8 rows took 1.1 times as long, and 1.2 times with an adapter, on Zen 4).
struct Fetch {
  const char *w0, *w1, *w0_end, *x, *x_end;
  const char *after0, *after1;  // in the cut after the next one; null: it is not fetched
  int64_t w_lines, x_lines;     // of each column tile, and of the rows, at a time
  LoraFetch loras;

  inline void go() {
    for (int64_t i = 0; i < w_lines && w0 < w0_end; ++i, w0 += 64, w1 += 64) {
      _mm_prefetch(w0, _MM_HINT_T0);
      _mm_prefetch(w1, _MM_HINT_T0);
      if (after0 == nullptr) continue;
      _mm_prefetch(after0, _MM_HINT_T1);
      _mm_prefetch(after1, _MM_HINT_T1);
      after0 += 64;
      after1 += 64;
    }
    for (int64_t i = 0; i < x_lines && x < x_end; ++i, x += 64) _mm_prefetch(x, _MM_HINT_T0);
    loras.go();
  }
};

inline __m512bh broadcast_pair(const char* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

inline __m512bh load_weights(const char* from) { return (__m512bh)_mm512_load_si512(from); }

// Multiplies a strip with `steps` k tiles of two column tiles. The sums [Rows][32] begin as zeros, or (resume) as what
// an earlier cut left in `sums`, and end there.
template <int Rows>
void multiply_strip(const char* a, int64_t a_step, const char* b0, const char* b1, int64_t steps, bool resume,
                    float* sums, Fetch& fetch) {
  constexpr int64_t kPairs = 16 / kParts;
  __m512 c0[Rows], c1[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    c0[r] = resume ? _mm512_load_ps(sums + r * 32) : _mm512_setzero_ps();
    c1[r] = resume ? _mm512_load_ps(sums + r * 32 + 16) : _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step, a += a_step - 64) {
    for (int64_t part = 0; part < kParts; ++part, a += kPairs * 4, b0 += kPairs * 64, b1 += kPairs * 64) {
      fetch.go();
#pragma GCC unroll 4
      for (int64_t pair = 0; pair < kPairs; ++pair) {
        const __m512bh w0 = load_weights(b0 + pair * 64), w1 = load_weights(b1 + pair * 64);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          const __m512bh x = broadcast_pair(a + r * 64 + pair * 4);
          c0[r] = _mm512_dpbf16_ps(c0[r], x, w0);
          c1[r] = _mm512_dpbf16_ps(c1[r], x, w1);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    _mm512_store_ps(sums + r * 32, c0[r]);
    _mm512_store_ps(sums + r * 32 + 16, c1[r]);
  }
}

// A block of rows: strips [first, last).
struct Block {
  int64_t first, last;
};

// K tiles [k, k + steps) of a pair of column tiles.
struct Cut {
  int64_t k, steps;
  const char *w0, *w1;
};

// Computes rows and pairs [begin, end) of a block, with the calls of expect and finish that store_products describes.
template <typename Pairs, typename Finish, typename Expect>
void run_pairs(const InputTiles& input, int64_t m, const Weight& w, const Expansion& expansion, Block block,
               Pairs pairs, int64_t begin, int64_t end, const Finish& finish, const Expect& expect) {
  const int64_t column_bytes = w.tile_elements() * 2, steps = input.k_tiles, strips = block.last - block.first;
  const int64_t cuts = (steps + kCutSteps - 1) / kCutSteps;
  const int64_t first_row = block.first * input.rows, last_row = std::min(m, block.last * input.rows);
  // The cuts of a pair, followed by those of the next one.
  const auto cut_at = [&](int64_t pair, int64_t index) -> Cut {
    const int64_t cut = index % cuts, k = steps * cut / cuts;
    const char* from = static_cast<const char*>(w.data) + k * kTileBytes;
    pair = std::min(pair + index / cuts, pairs.count() - 1);
    return {k, steps * (cut + 1) / cuts - k, from + pairs.first(pair) * column_bytes,
            from + pairs.second(pair) * column_bytes};
  };
  alignas(64) float sums[kBlockStrips * kStrip * 32];
  Fetch fetch = {};
  fetch.x_lines = (input.rows + kParts - 1) / kParts;
  Cut here = cut_at(begin, 0), next = cut_at(begin, 1);
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t t0 = pairs.first(pair), t1 = pairs.second(pair);
    if (expansion.shrunk != nullptr && last_row - first_row <= kLoraRows)
      fetch.loras = expansion.fetch(first_row, last_row, t0, t1, strips * steps * kParts);
    for (int64_t cut = 0; cut < cuts; ++cut) {
      const Cut after_next = cut_at(pair, cut + 2);
      const bool last = cut + 1 == cuts;
      const int64_t calls = strips * here.steps * kParts;
      fetch.w0 = next.w0;
      fetch.w1 = next.w1;
      fetch.w0_end = next.w0 + next.steps * kTileBytes;
      fetch.w_lines = (next.steps * (kTileBytes / 64) + calls - 1) / calls;
      if (strips == 1) {
        fetch.after0 = after_next.w0;
        fetch.after1 = after_next.w1;
      }
      for (int64_t strip = block.first; strip < block.last; ++strip) {
        const int64_t row = strip * input.rows, rows = std::min(input.rows, m - row);
        float* to = sums + (strip - block.first) * kStrip * 32;
        const bool last_strip = strip + 1 == block.last;
        fetch.x = last_strip ? input.tile(block.first, next.k) : input.tile(strip + 1, here.k);
        fetch.x_end = fetch.x + (last_strip ? next.steps : here.steps) * input.step();
        for (int64_t r = 0; last && r < rows; ++r)
          expect(row + r, pair, [](const float* line) { __builtin_prefetch(line, 1); });
        with_rows<kStrip>(rows, [&](auto constant) {
          multiply_strip<decltype(constant)::value>(input.tile(strip, here.k), input.step(), here.w0, here.w1,
                                                    here.steps, cut > 0, to, fetch);
        });
        if (!last) continue;
        complete_rows(w, expansion, row, rows, t0, t1, to);
        finish(row, rows, pair, to);
      }
      here = next;
      next = after_next;
    }
  }
}

// t = x @ A.T * scaling for Rows rows of a run, from `row` on, and a tile of ranks. Each element is four chains, of
// every fourth k pair.
template <int Rows>
void shrink_rows(const InputTiles& input, const Lora& lora, int64_t row, int64_t tile, float* shrunk, int64_t stride) {
  const char* a = static_cast<const char*>(lora.a.data) + tile * lora.a.tile_elements() * 2;
  const char* x[Rows];
  __m512 sums[Rows][4] = {};
  for (int r = 0; r < Rows; ++r) x[r] = input.row(row + r);
  for (int64_t step = 0; step < input.k_tiles; ++step) {
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < 16; pair += 4, a += 4 * 64) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512bh weights = load_weights(a + i * 64);
        _mm_prefetch(a + i * 64 + kShrinkAhead, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
          sums[r][i] = _mm512_dpbf16_ps(sums[r][i], broadcast_pair(x[r] + (pair + i) * 4), weights);
      }
    }
    for (int r = 0; r < Rows; ++r) x[r] += input.step();
  }
  const Floats16 scaling = load(lora.scaling() + tile * 16);
  for (int r = 0; r < Rows; ++r) {
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]), _mm512_add_ps(sums[r][2], sums[r][3]));
    store(shrunk + (row + r) * stride + tile * 16, mul({sum}, scaling));
  }
}

void shrink_run(const InputTiles& input, const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
  for (int64_t row = run.row, end = run.row + run.rows; row < end; row += kShrinkRows)
    with_rows<kShrinkRows>(
        end - row, [&](auto rows) { shrink_rows<decltype(rows)::value>(input, *run.lora, row, tile, shrunk, stride); });
}

// Calls expect and finish as store_products describes.
template <typename Pairs, typename Finish, typename Expect>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish,
                   Expect expect) {
  const InputTiles input(rows.data, tile_rows(rows.m), w);
  const Expansion expansion = shrink_all(
      loras, rows.m, [](const auto& work) { work(); },
      [&](const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
        shrink_run(input, run, tile, shrunk, stride);
      });
  const int64_t strips = strips_of(rows.m), blocks = (strips + kBlockStrips - 1) / kBlockStrips, count = pairs.count();
  const int64_t block_strips = (strips + blocks - 1) / blocks;
  const int64_t grain = std::max<int64_t>(1, kPieceBytes / (input.k_tiles * 2 * kTileBytes * block_strips));
  parallel_pieces(blocks * count, grain, [&](Pieces& pieces) {
    for (int64_t begin, end; pieces.next(&begin, &end);) {
      for (int64_t item = begin; item < end;) {
        const int64_t block = item / count, stop = std::min(end, (block + 1) * count);
        run_pairs(input, rows.m, w, expansion, {strips * block / blocks, strips * (block + 1) / blocks}, pairs,
                  item - block * count, stop - block * count, finish, expect);
        item = stop;
      }
    }
    _mm_sfence();  // streaming stores become visible before the job counts as done
  });
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

}  // namespace avx512_bf16
}  // namespace fd
