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
constexpr int64_t kLoraRows = 32;  // rows of which the adapters are prefetched
constexpr int64_t kParts = 4;      // parts of a step, with prefetches before each
// Bytes of one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{256} << 10;

int64_t strips_of(int64_t m) { return std::max<int64_t>(1, (m + kStrip - 1) / kStrip); }

// Rows of a row tile, which is a strip: strips of the same height, up to 12.
int64_t tile_rows(int64_t m) { return std::max<int64_t>(1, (m + strips_of(m) - 1) / strips_of(m)); }

InputTiles new_tiles(ScratchSlot slot, int64_t m, const Weight& w) {
  return InputTiles(slot, m, tile_rows(m), tile_rows(m), w);
}

// Prefetches what the next multiplications need, a few lines at a time: the next cut of two column tiles, the
// rows of the next strip, and adapters.
struct Fetch {
  const char *w0, *w1, *w0_end, *x, *x_end;
  int64_t w_lines, x_lines;  // of each column tile, and of the rows, at a time
  LoraFetch loras;

  inline void go() {
    for (int64_t i = 0; i < w_lines && w0 < w0_end; ++i, w0 += 64, w1 += 64) {
      _mm_prefetch(w0, _MM_HINT_T0);
      _mm_prefetch(w1, _MM_HINT_T0);
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

// For each row of a block and each pair in [begin, end): calls expect(row, pair), computes, and calls finish(row, pair,
// first 16 columns, second 16 columns).
template <typename Pairs, typename Finish, typename Expect>
void run_pairs(const InputTiles& input, int64_t m, const Weight& w, const Expansion& expansion, Block block,
               Pairs pairs, int64_t begin, int64_t end, const Finish& finish, const Expect& expect) {
  const char* weight = static_cast<const char*>(w.data);
  const int64_t column_bytes = w.tile_elements() * 2, steps = input.k_tiles, strips = block.last - block.first;
  const int64_t cuts = (steps + kCutSteps - 1) / kCutSteps;
  const int64_t first_row = block.first * input.rows, last_row = std::min(m, block.last * input.rows);
  alignas(64) float sums[kBlockStrips * kStrip * 32];
  Fetch fetch = {};
  fetch.x_lines = (input.rows + kParts - 1) / kParts;
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t t0 = pairs.first(pair), t1 = pairs.second(pair), following = std::min(pair + 1, pairs.count() - 1);
    const char *b0 = weight + t0 * column_bytes, *b1 = weight + t1 * column_bytes;
    if (expansion.shrunk != nullptr && last_row - first_row <= kLoraRows)
      fetch.loras = expansion.fetch(first_row, last_row, t0, t1, strips * steps * kParts);
    for (int64_t cut = 0; cut < cuts; ++cut) {
      const int64_t k = steps * cut / cuts, k_end = steps * (cut + 1) / cuts, count = k_end - k;
      const bool last = cut + 1 == cuts;
      // The next cut, or the first one of the following pair.
      const int64_t next_k = last ? 0 : k_end, next_end = steps * (last ? 1 : cut + 2) / cuts;
      const int64_t calls = strips * count * kParts;
      fetch.w0 = weight + pairs.first(last ? following : pair) * column_bytes + next_k * kTileBytes;
      fetch.w1 = weight + pairs.second(last ? following : pair) * column_bytes + next_k * kTileBytes;
      fetch.w0_end = fetch.w0 + (next_end - next_k) * kTileBytes;
      fetch.w_lines = ((next_end - next_k) * (kTileBytes / 64) + calls - 1) / calls;
      for (int64_t strip = block.first; strip < block.last; ++strip) {
        const int64_t row = strip * input.rows, rows = std::min(input.rows, m - row);
        float* to = sums + (strip - block.first) * kStrip * 32;
        const bool last_strip = strip + 1 == block.last;
        fetch.x = last_strip ? input.tile(block.first, next_k) : input.tile(strip + 1, k);
        fetch.x_end = fetch.x + (last_strip ? next_end - next_k : count) * input.step();
        for (int64_t r = 0; last && r < rows; ++r) expect(row + r, pair);
        with_rows<kStrip>(rows, [&](auto constant) {
          multiply_strip<decltype(constant)::value>(input.tile(strip, k), input.step(), b0 + k * kTileBytes,
                                                    b1 + k * kTileBytes, count, cut > 0, to, fetch);
        });
        for (int64_t r = 0; last && r < rows; ++r) finish(row + r, pair, load(to + r * 32), load(to + r * 32 + 16));
      }
    }
  }
}

// t = x @ A.T * scaling for the rows of a run and a tile of ranks. Each element is four chains, of every fourth k pair.
void shrink_run(const InputTiles& input, const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
  const Weight& a = run.lora->a;
  const char* weight = static_cast<const char*>(a.data) + tile * a.tile_elements() * 2;
  const Floats16 scaling = load(run.lora->scaling() + tile * 16);
  for (int64_t row = run.row; row < run.row + run.rows; ++row) {
    __m512 sums[4] = {};
    const char *x = input.row(row), *b = weight;
    for (int64_t step = 0; step < input.k_tiles; ++step, x += input.step())
      for (int64_t pair = 0; pair < 16; pair += 4, b += 4 * 64)
        for (int i = 0; i < 4; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i], broadcast_pair(x + (pair + i) * 4), load_weights(b + i * 64));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    store(shrunk + row * stride + tile * 16, mul({sum}, scaling));
  }
}

// Calls expect(row, pair), then finish(row, pair, value of its first tile, value of its second) for every row and every
// pair of column tiles.
template <typename Pairs, typename Finish, typename Expect>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish,
                   Expect expect) {
  const InputTiles input(rows.data, tile_rows(rows.m), w);
  const Expansion expansion = shrink_all(
      loras, rows.m, [](const auto& work) { work(); },
      [&](const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
        shrink_run(input, run, tile, shrunk, stride);
      });
  const auto finish_sums = [&](int64_t row, int64_t pair, Floats16 c0, Floats16 c1) {
    const Floats16 value0 = complete(w, expansion, row, pairs.first(pair), c0);
    finish(row, pair, value0, complete(w, expansion, row, pairs.second(pair), c1));
  };
  const int64_t strips = strips_of(rows.m), blocks = (strips + kBlockStrips - 1) / kBlockStrips, count = pairs.count();
  const int64_t block_strips = (strips + blocks - 1) / blocks;
  const int64_t grain = std::max<int64_t>(1, kPieceBytes / (input.k_tiles * 2 * kTileBytes * block_strips));
  parallel_pieces(blocks * count, grain, [&](Pieces& pieces) {
    for (int64_t begin, end; pieces.next(&begin, &end);) {
      for (int64_t item = begin; item < end;) {
        const int64_t block = item / count, stop = std::min(end, (block + 1) * count);
        run_pairs(input, rows.m, w, expansion, {strips * block / blocks, strips * (block + 1) / blocks}, pairs,
                  item - block * count, stop - block * count, finish_sums, expect);
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
                           const Weight& next) {
  const InputTiles inner = new_tiles(slot, input.m, next);
  gate_products(input.m, w, inner, [&](auto... how) { for_all_pairs(input, w, loras, how...); });
  return {inner.data, input.m};
}

}  // namespace avx512_bf16
}  // namespace fd
