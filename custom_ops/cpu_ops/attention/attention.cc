// The products of attention on vectors: VDPBF16PS on avx512_bf16, else FMA on float32. Compiled once per instruction
// set.
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "attention/blocked.h"
#include "runtime/simd.h"

#if defined(__AVX512BF16__)
#include "attention/rounded.h"
#endif

namespace fd {
namespace FD_ISA {
namespace {

// Always inline: g++ takes a function that only fetches for one without effect, and drops its calls.
[[gnu::always_inline]] inline void prefetch(const void* line) {
  _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0);
}

// An operand class says how to multiply pairs: two neighbouring elements of a row on the left, and 16 columns of a pair
// on the right.

#if defined(__AVX512BF16__)

// Rows and vectors of 16 columns of one pass: their sums stay in registers.
constexpr int kMaxRows = 8, kMaxVectors = 2;

struct RoundedPairs : Rounded {
  static constexpr bool kInterleaved = true;
  using Right = __m512bh;
  using Pair = __m512bh;

  static Right load_right(const uint16_t* p, int64_t) { return (__m512bh)_mm512_loadu_si512(p); }
  [[gnu::always_inline]] static inline void fetch(const uint16_t* p) { prefetch(p); }
  static Pair broadcast(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Floats16 multiply(Pair a, Right b, Floats16 sum) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }
};

#else

#if defined(__AVX512F__)
constexpr int kMaxRows = 8, kMaxVectors = 2;
#else
constexpr int kMaxRows = 4, kMaxVectors = 1;
#endif

// Queries and probabilities are not rounded.
struct Exact {
  using Left = float;

  static void prepare(const AttentionArgs& a, float* query) { prepare_attention(a, query, false); }
  struct Mode {};

  static Floats16 power_of_2(Floats16 x) { return exp2(x); }
  static void store_weights(const Floats16* weights, float* to) {
    for (int64_t u = 0; u < kUnits; ++u) store(to + u * kUnit, weights[u]);
  }

  using Right = Pairs;
  using Pair = const float*;

  static Pair broadcast(const float* p) { return p; }
  static Floats16 multiply(Pair a, Right b, Floats16 sum) {
    return fma(set1(a[1]), b.high, fma(set1(a[0]), b.low, sum));
  }
};

// A bfloat16 cache.
struct WidenedPairs : Exact {
  using Element = uint16_t;
  static constexpr bool kInterleaved = true;
  static Right load_right(const uint16_t* p, int64_t) { return load_pairs(p); }
  [[gnu::always_inline]] static inline void fetch(const uint16_t* p) { prefetch(p); }
};

// A float32 cache, where the second of a pair lies `between` elements behind the first.
struct FloatPairs : Exact {
  using Element = float;
  static constexpr bool kInterleaved = false;
  static Right load_right(const float* p, int64_t between) { return {load(p), load(p + between)}; }
  [[gnu::always_inline]] static inline void fetch(const float* p) {
    prefetch(p);
    prefetch(p + 16);
  }
};

#endif

template <int N>
using Count = std::integral_constant<int, N>;

// Calls body with a Count of n, 1 <= n <= Most.
template <int Most, typename Body>
inline void with_count(int64_t n, Body&& body) {
  if constexpr (Most > 1) {
    if (n < Most) return with_count<Most - 1>(n, body);
  }
  body(Count<Most>());
}

// Calls body(row, count, fetch) for passes of at most kMaxRows rows, as equal as possible. fetch: in the first pass.
template <typename Body>
inline void for_rows(int64_t rows, Body&& body) {
  int64_t row = 0;
  for (int64_t passes = (rows + kMaxRows - 1) / kMaxRows; passes > 0; --passes) {
    const int64_t count = (rows - row + passes - 1) / passes;
    with_count<kMaxRows>(count,
                         [&](auto n) { row == 0 ? body(row, n, std::true_type()) : body(row, n, std::false_type()); });
    row += count;
  }
}

// Calls body(vector, count) for passes of kMaxVectors vectors, then of one.
template <typename Body>
inline void for_vectors(int64_t vectors, Body&& body) {
  int64_t v = 0;
  for (; v + kMaxVectors <= vectors; v += kMaxVectors) body(v, Count<kMaxVectors>());
  for (; v < vectors; ++v) body(v, Count<1>());
}

template <typename Operands>
class VectorProducts : public Operands {
 public:
  using Element = typename Operands::Element;
  using Left = typename Operands::Left;

  explicit VectorProducts(int64_t padded) : padded_(padded) {}

  void enter(const KeyBlock<Element>&) {}

  // score and add_values are not inline: with AVX2, g++ else allocates registers so that both take a quarter longer.

  // scores [rows][64] = query [rows][Dp] x keys.
  [[gnu::noinline]] void score(const Left* query, int64_t rows, const KeyBlock<Element>& block, float* scores) const {
    for_rows(rows, [&](int64_t row, auto count, auto fetch) {
      for_vectors(block.units, [&](int64_t unit, auto units) {
        score_pass<count.value, units.value, fetch.value>(query + row * padded_, block, unit,
                                                          scores + row * kKeyBlock + unit * kUnit);
      });
    });
  }

  // out [rows][Dp] = out * shrink + probabilities [rows][64] x values.
  [[gnu::noinline]] void add_values(const Left* probabilities, const float* shrink, int64_t rows,
                                    const KeyBlock<Element>& block, float* out) const {
    for_rows(rows, [&](int64_t row, auto count, auto fetch) {
      for_vectors(padded_ / 16, [&](int64_t vector, auto vectors) {
        values_pass<count.value, vectors.value, fetch.value>(probabilities + row * kKeyBlock, shrink + row, block,
                                                             vector * 16, out + row * padded_ + vector * 16);
      });
    });
  }

 private:
  // Units [unit, unit + kVectors).
  template <int kRows, int kVectors, bool kFetch>
  void score_pass(const Left* query, const KeyBlock<Element>& block, int64_t unit, float* scores) const {
    Floats16 sums[kRows][kVectors];
    for (auto& row : sums)
      for (auto& sum : row) sum = zero();
    const int64_t part = padded_ / kVectors;  // dims of a call, which fetches one piece
    for (int h = 0; h < kVectors; ++h) {
      const Element* right[kVectors];
      for (int v = 0; v < kVectors; ++v) right[v] = block.keys[unit + v] + h * part * kUnit;
      add<kFetch>(block.fetch && unit + h < kWithScores, query + h * part, padded_, right, block.ahead[unit + h],
                  part / 2, 2 * kUnit, kUnit, sums);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(scores + r * kKeyBlock + v * kUnit, sums[r][v]);
  }

  // Columns [dim, dim + 16 * kVectors).
  template <int kRows, int kVectors, bool kFetch>
  void values_pass(const Left* probabilities, const float* shrink, const KeyBlock<Element>& block, int64_t dim,
                   float* out) const {
    constexpr int64_t kRead = kVectors * 16 * kUnit;               // elements that a call of add reads
    constexpr int64_t kVector = Operands::kInterleaved ? 32 : 16;  // elements of 16 columns
    Floats16 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = mul(load(out + r * padded_ + v * 16), set1(shrink[r]));
    const int64_t piece = padded_ * kUnit;
    // What goes with a call lies at `at` in piece `ahead`: the passes before had the beginning of the second half.
    int64_t ahead = kUnits + dim * kKeyBlock / piece, at = dim * kKeyBlock % piece;
    for (int64_t u = 0; u < block.units; ++u) {
      const Element* values[kVectors];
      for (int v = 0; v < kVectors; ++v) values[v] = block.values[u] + (dim / 16 + v) * kVector;
      add<kFetch>(block.fetch && ahead >= kWithValues, probabilities + u * kUnit, kKeyBlock, values,
                  block.ahead[ahead] + at, kUnit / 2, 2 * padded_, padded_, sums);
      at += kRead;
      if (at < piece) continue;
      at = 0;
      ++ahead;
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(out + r * padded_ + v * 16, sums[r][v]);
  }

  // add_products; kFetch and `fetch`: whether it fetches.
  template <bool kFetch, int kRows, int kVectors>
  [[gnu::always_inline]] static inline void add(bool fetch, const Left* left, int64_t stride,
                                                const Element* const* right, const Element* ahead, int64_t pairs,
                                                int64_t step, int64_t between, Floats16 (&sums)[kRows][kVectors]) {
    if (kFetch && fetch) return add_products<true>(left, stride, right, ahead, pairs, step, between, sums);
    add_products<false>(left, stride, right, ahead, pairs, step, between, sums);
  }

  // sums += left [rows][pairs of elements] x right, in the order of the pairs. A pair of 16 columns lies `step`
  // elements behind the pair before; the second of a pair, unless they are interleaved, `between` behind the first.
  // As much as it reads is fetched from `ahead` on.
  template <bool kFetch, int kRows, int kVectors>
  [[gnu::always_inline]] static inline void add_products(const Left* left, int64_t stride, const Element* const* right,
                                                         const Element* ahead, int64_t pairs, int64_t step,
                                                         int64_t between, Floats16 (&sums)[kRows][kVectors]) {
    for (int64_t i = 0; i < pairs; ++i) {
      typename Operands::Right columns[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = Operands::load_right(right[v] + i * step, between);
        if (kFetch) Operands::fetch(ahead + (i * kVectors + v) * 32);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto pair = Operands::broadcast(left + r * stride + i * 2);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Operands::multiply(pair, columns[v], sums[r][v]);
      }
    }
  }

  const int64_t padded_;
};

}  // namespace

void attention(const AttentionArgs& a) {
#if defined(__AVX512BF16__)
  run_attention<VectorProducts<RoundedPairs>>(a);
#else
  a.cache->bf16 ? run_attention<VectorProducts<WidenedPairs>>(a) : run_attention<VectorProducts<FloatPairs>>(a);
#endif
}

}  // namespace FD_ISA
}  // namespace fd
