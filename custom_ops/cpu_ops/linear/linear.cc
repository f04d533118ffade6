// Linears and embedding lookup with vector FMA, for float32 weights everywhere and for bfloat16 ones without AMX.
// Compiled once per instruction set.
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, 2, ...: its bits depend only on its own row
// of x and its own column of the weight.
#include <algorithm>
#include <cstring>

#include "linear/linear.h"
#include "linear/shrink.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

// Rows of x that share one pass over a weight tile pair: two accumulators each, out of 32 (AVX-512) or 16 half-width
// (AVX2) registers.
#if defined(__AVX512F__)
constexpr int kRows = 8;
#else
constexpr int kRows = 3;
#endif

// Rows of x that are computed while a pair of columns stays in L2.
constexpr int64_t kRowBlock = 256;

// How far ahead the first rows of a pair of columns fetch its weights. Without this, several rows wait for memory and
// compute in turns (8 rows took 1.4 times as long); one row has no need of it.
constexpr int64_t kFetchBytes = 4096;

// Prefetches two column tiles, and then those of the next pair.
struct Fetch {
  const char *tile0, *tile1, *end0, *next0, *next1;

  inline void go() {
    if (tile0 == end0) {
      tile0 = next0;
      tile1 = next1;
    }
    _mm_prefetch(tile0, _MM_HINT_T0);
    _mm_prefetch(tile1, _MM_HINT_T0);
    tile0 += 64;
    tile1 += 64;
  }
};

// `beside` runs once per step over k, for work that does not wait: prefetches.
template <int Rows, typename Beside>
void multiply_f32(const float* x, int64_t ldx, const float* w0, const float* w1, int64_t k, Floats16* acc,
                  Beside& beside) {
  Floats16 c0[Rows], c1[Rows];
  for (int r = 0; r < Rows; ++r) c0[r] = c1[r] = zero();
  for (int64_t i = 0; i < k; ++i) {
    beside();
    const Floats16 b0 = load(w0 + i * 16), b1 = load(w1 + i * 16);
    for (int r = 0; r < Rows; ++r) {
      const Floats16 a = set1(x[r * ldx + i]);
      c0[r] = fma(a, b0, c0[r]);
      c1[r] = fma(a, b1, c1[r]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    acc[2 * r] = c0[r];
    acc[2 * r + 1] = c1[r];
  }
}

template <int Rows, typename Beside>
void multiply_bf16(const float* x, int64_t ldx, const uint16_t* w0, const uint16_t* w1, int64_t k, Floats16* acc,
                   Beside& beside) {
  Floats16 c0[Rows], c1[Rows];
  for (int r = 0; r < Rows; ++r) c0[r] = c1[r] = zero();
  for (int64_t i = 0; i < k; i += 2) {
    beside();
    const Pairs b0 = load_pairs(w0 + i * 16), b1 = load_pairs(w1 + i * 16);
    for (int r = 0; r < Rows; ++r) {
      const Floats16 even = set1(x[r * ldx + i]), odd = set1(x[r * ldx + i + 1]);
      c0[r] = fma(odd, b0.high, fma(even, b0.low, c0[r]));
      c1[r] = fma(odd, b1.high, fma(even, b1.low, c1[r]));
    }
  }
  for (int r = 0; r < Rows; ++r) {
    acc[2 * r] = c0[r];
    acc[2 * r + 1] = c1[r];
  }
}

template <int Rows, typename Beside>
void multiply(const Weight& w, const float* x, int64_t ldx, int64_t tile0, int64_t tile1, Floats16* acc,
              Beside& beside) {
  const int64_t step = w.tile_elements();
  if (w.bf16) {
    const uint16_t* data = static_cast<const uint16_t*>(w.data);
    multiply_bf16<Rows>(x, ldx, data + tile0 * step, data + tile1 * step, w.k_padded, acc, beside);
  } else {
    const float* data = static_cast<const float*>(w.data);
    multiply_f32<Rows>(x, ldx, data + tile0 * step, data + tile1 * step, w.k, acc, beside);
  }
}

Expansion shrink(const LinearInput& input, const LoraRows& loras) {
  const auto shrink_run = [&](const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
    const int64_t ldx = run.lora->a.k_padded, end = run.row + run.rows;
    for (int64_t r = run.row; r < end; r += kRows) {
      const float* x = static_cast<const float*>(input.data) + r * ldx;
      with_rows<kRows>(end - r, [&](auto rows) {
        shrink_rows<decltype(rows)::value>(*run.lora, tile, x, ldx, shrunk + r * stride, stride);
      });
    }
  };
  return shrink_all(loras, input.m, [](const auto& work) { work(); }, shrink_run);
}

// The size of the next of the fewest parts, of at most `most` items each, that divide `count` items evenly. A part of
// one row would wait for each of its own products: 2 + 2 rows take less time than 3 + 1.
int64_t even_part(int64_t count, int64_t most) {
  const int64_t parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

// Calls finish(row, pair, value of its first tile, value of its second) for every row and every pair of column tiles.
template <typename Pairs, typename Finish>
void for_all_pairs(const LinearInput& input, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish) {
  const Expansion expansion = shrink(input, loras);
  const int64_t m = input.m, ldx = w.k_padded;
  const float* rows_data = static_cast<const float*>(input.data);
  const char* data = static_cast<const char*>(w.data);
  for (int64_t block = 0; block < m; block += kRowBlock) {
    const int64_t block_end = std::min(m, block + kRowBlock);
    const int64_t tile_bytes = w.tile_elements() * (w.bf16 ? 2 : 4);
    const int64_t grain = m == 1 ? std::max<int64_t>(1, 32768 / tile_bytes) : 1;
    parallel_for(pairs.count(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t tile0 = pairs.first(pair), tile1 = pairs.second(pair),
                      next = std::min(pair + 1, pairs.count() - 1);
        const int64_t ahead = std::min(kFetchBytes, tile_bytes);
        Fetch fetch = {data + tile0 * tile_bytes + ahead, data + tile1 * tile_bytes + ahead,
                       data + (tile0 + 1) * tile_bytes, data + pairs.first(next) * tile_bytes,
                       data + pairs.second(next) * tile_bytes};
        for (int64_t r = block, rows = 0; r < block_end; r += rows) {
          rows = even_part(block_end - r, kRows);
          Floats16 acc[2 * kRows];
          const auto run = [&](auto beside) {
            with_rows<kRows>(rows, [&](auto count) {
              multiply<decltype(count)::value>(w, rows_data + r * ldx, ldx, tile0, tile1, acc, beside);
            });
          };
          LoraFetch loras_ahead;
          if (expansion.shrunk != nullptr) loras_ahead = expansion.fetch(r, r + rows, tile0, tile1, w.k_padded / 2);
          if (m > 1 && r == block) {
            run([&] {
              fetch.go();
              loras_ahead.go();
            });
          } else if (expansion.shrunk != nullptr) {
            run([&] { loras_ahead.go(); });
          } else {
            run([] {});
          }
          for (int64_t i = 0; i < rows; ++i) {
            const Floats16 value0 = complete(w, expansion, r + i, tile0, acc[2 * i]);
            finish(r + i, pair, value0, complete(w, expansion, r + i, tile1, acc[2 * i + 1]));
          }
        }
      }
    });
  }
}

Floats16 rounded(const Weight& w, Floats16 value) { return w.bf16 ? round_bf16(value) : value; }

}  // namespace

// float32 rows of k_padded: rounded to bfloat16 (as AMX does) and padded with zeros where the weights are bfloat16.
LinearInput make_linear_input(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m,
                              const Weight& w) {
  if (norm == nullptr && !w.bf16) return {x, m};
  float* rows = static_cast<float*>(scratch(slot, static_cast<size_t>(m * w.k_padded) * 4));
  parallel_for(m, std::max<int64_t>(1, 16384 / w.k_padded), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = x + r * w.k;
      float* to = rows + r * w.k_padded;
      const Floats16 factor = set1(norm == nullptr ? 1.0f : norm_factor(from, w.k, eps));
      for (int64_t k = 0; k < w.k; k += 16) {
        const int count = static_cast<int>(std::min<int64_t>(16, w.k - k));
        Floats16 v = load_n(from + k, count);
        if (norm != nullptr) v = mul(mul(v, factor), load_n(norm + k, count));
        store_n(to + k, rounded(w, v), count);
      }
      std::memset(to + w.k, 0, static_cast<size_t>(w.k_padded - w.k) * 4);
    }
  });
  return {rows, m};
}

void multiply(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate) {
  const Neighbours pairs = {w.tiles()};
  for_all_pairs(input, w, loras, pairs, [&](int64_t row, int64_t pair, Floats16 c0, Floats16 c1) {
    float* to = out + row * w.n;
    const auto put = accumulate ? add_columns : store_columns;
    put(to, 2 * pair, w.n, c0);
    if (2 * pair + 1 < pairs.tiles) put(to, 2 * pair + 1, w.n, c1);
  });
}

LinearInput multiply_gated(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                           Activation activation, const Weight& next) {
  const int64_t half = w.n / 2, m = input.m;
  float* rows = static_cast<float*>(scratch(slot, static_cast<size_t>(m * next.k_padded) * 4));
  for_all_pairs(input, w, loras, Halves{half / kColumns}, [&](int64_t row, int64_t pair, Floats16 gate, Floats16 up) {
    store(rows + row * next.k_padded + pair * kColumns, rounded(next, gated(activation, gate, up)));
  });
  for (int64_t r = 0; r < m; ++r)
    std::memset(rows + r * next.k_padded + half, 0, static_cast<size_t>(next.k_padded - half) * 4);
  return {rows, m};
}

void embedding(const int32_t* ids, int64_t m, const Weight& w, float* out) {
  parallel_for(m, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t tile = ids[r] / kColumns, lane = ids[r] % kColumns;
      float* to = out + r * w.k;
      if (w.bf16) {
        const uint16_t* from = static_cast<const uint16_t*>(w.data) + tile * w.tile_elements() + lane * 2;
        for (int64_t k = 0; k < w.k; ++k) {
          const uint32_t bits = static_cast<uint32_t>(from[k / 2 * 32 + k % 2]) << 16;
          std::memcpy(to + k, &bits, 4);
        }
      } else {
        const float* from = static_cast<const float*>(w.data) + tile * w.tile_elements() + lane;
        for (int64_t k = 0; k < w.k; ++k) to[k] = from[k * kColumns];
      }
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
