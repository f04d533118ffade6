// Adapters in linears. The shrink, t = x @ A.T * scaling, runs before the product with the base weight (linear.cc,
// linear_amx.cc). The expansion, t @ B.T, is added where an element of that product is complete.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "linear/with_rows.h"
#include "runtime/memory.h"
#include "runtime/simd.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kRunRows = 16;
// Rows that share a pass over B: two sums each, out of 32 (AVX-512) or 16 half-width (AVX2) registers.
#if defined(__AVX512F__)
constexpr int64_t kExpandRows = 8;
#else
constexpr int64_t kExpandRows = 2;
#endif

// Adjacent rows of one adapter in one tile of 16 rows.
struct LoraRun {
  const Lora* lora;
  int64_t row, rows;
};

// Prefetches the B of some rows, a few lines at a time. All lines at once would wait for one another: a core waits for
// some 16 lines at most, which is a fraction of what memory delivers.
struct LoraFetch {
  static constexpr int kMost = 64;  // pieces
  struct Piece {
    const char *next, *end;
  } pieces[kMost];
  int count = 0, at = 0;
  int64_t lines = 0;  // of all pieces, then of a step

  inline void add(const Lora& lora, int64_t column_tile) {
    const LoraTile tile = lora.tiles()[column_tile];
    const int64_t element = lora.a.bf16 ? 2 : 4, size = tile.count * kColumns * element;
    const char* from = static_cast<const char*>(lora.b()) + tile.b * element;
    if (size == 0 || count == kMost) return;
    pieces[count++] = {from, from + size};
    lines += size / 64;
  }

  // Divides the lines by the steps in which they are fetched.
  inline void spread(int64_t steps) { lines = steps > 0 ? (lines + steps - 1) / steps : 0; }

  inline void go() {
    for (int64_t i = 0; i < lines && at < count; ++i) {
      Piece& piece = pieces[at];
      _mm_prefetch(piece.next, _MM_HINT_T0);
      piece.next += 64;
      at += piece.next >= piece.end;
    }
  }
};

// The shrunk rows of a linear, and what expands them. Without `shrunk`, no row has an adapter.
struct Expansion {
  LoraRows loras;
  float* shrunk;   // float32 [m, stride]; undefined for rows without an adapter
  int64_t stride;  // the largest rank of an adapter here, in whole tiles

  // Returns `value` + t @ B.T for a row and a column tile, in two chains: even and odd ranks in order. A row without an
  // adapter keeps its bits.
  inline Floats16 add_to(Floats16 value, int64_t row, int64_t column_tile) const {
    if (shrunk == nullptr) return value;
    const Lora* lora = loras.of(row);
    if (lora != nullptr) expand<1>(*lora, shrunk + row * stride, stride, column_tile, &value);
    return value;
  }

  // The same for rows [first, first + count) and two column tiles; values: float32 [count][2][16]. Rows of one adapter
  // share a pass over its B.
  inline void add_to_rows(float* values, int64_t first, int64_t count, int64_t tile0, int64_t tile1) const {
    for (int64_t r = 0, end; r < count; r = end) {
      for (end = r + 1; end < count && end - r < kExpandRows && loras.rows[first + end] == loras.rows[first + r];)
        ++end;
      const Lora* lora = loras.of(first + r);
      if (lora == nullptr) continue;
      const float* t = shrunk + (first + r) * stride;
      with_rows<kExpandRows>(end - r, [&](auto rows) {
        constexpr int kCount = decltype(rows)::value;
        for (int half = 0; half < 2; ++half) {
          float* from = values + (r * 2 + half) * kColumns;
          Floats16 sums[kCount];
          for (int i = 0; i < kCount; ++i) sums[i] = load(from + i * 2 * kColumns);
          expand<kCount>(*lora, t, stride, half == 0 ? tile0 : tile1, sums);
          for (int i = 0; i < kCount; ++i) store(from + i * 2 * kColumns, sums[i]);
        }
      });
    }
  }

  // Prepares the prefetch of what add_to reads for rows [first, last) and two column tiles.
  inline LoraFetch fetch(int64_t first, int64_t last, int64_t tile0, int64_t tile1, int64_t steps) const {
    LoraFetch found;
    for (int64_t row = first; row < last; ++row) {
      const Lora* lora = loras.of(row);
      if (lora == nullptr || (row > first && loras.rows[row] == loras.rows[row - 1])) continue;
      found.add(*lora, tile0);
      found.add(*lora, tile1);
    }
    found.spread(steps);
    return found;
  }

  // Adds t @ B.T to the values of Rows rows and a column tile. t: float32, `stride` from row to row.
  template <int Rows>
  static inline void expand(const Lora& lora, const float* t, int64_t stride, int64_t column_tile, Floats16* values) {
    const LoraTile tile = lora.tiles()[column_tile];
    if (tile.count == 0) return;
    t += tile.first;
    Floats16 even[Rows], odd[Rows];
    for (int r = 0; r < Rows; ++r) {
      even[r] = values[r];
      odd[r] = zero();
    }
    for (int64_t j = 0; j < tile.count; j += 2) {
      const Pairs b = load_ranks(lora, tile, j);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        even[r] = fma(set1(t[r * stride + j]), b.low, even[r]);
        odd[r] = fma(set1(t[r * stride + j + 1]), b.high, odd[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) values[r] = add(even[r], odd[r]);
  }

  // Returns the ranks j and j + 1 of a column tile of B.
  static inline Pairs load_ranks(const Lora& lora, const LoraTile& tile, int64_t j) {
    if (lora.a.bf16) return load_pairs(static_cast<const uint16_t*>(lora.b()) + tile.b + j * kColumns);
    const float* b = static_cast<const float*>(lora.b()) + tile.b + j * kColumns;
    return {load(b), load(b + kColumns)};
  }
};

// Divides the rows of a linear into runs. Returns how many there are; most_tiles: the rank tiles of the largest
// adapter.
static inline int64_t cut_rows(const LoraRows& loras, int64_t m, LoraRun* runs, int64_t* most_tiles) {
  int64_t count = 0;
  for (int64_t row = 0, end; row < m; row = end) {
    for (end = row + 1; end < m && end % kRunRows != 0 && loras.rows[end] == loras.rows[row];) ++end;
    const Lora* lora = loras.of(row);
    if (lora == nullptr) continue;
    runs[count++] = {lora, row, end - row};
    *most_tiles = std::max(*most_tiles, lora->a.tiles());
  }
  return count;
}

// Shrinks the m rows of a linear: calls shrink_run(run, rank tile, shrunk, stride) for all runs and their rank tiles,
// on each thread within around(work).
template <typename Around, typename ShrinkRun>
inline Expansion shrink_all(const LoraRows& loras, int64_t m, Around around, ShrinkRun shrink_run) {
  if (loras.rows == nullptr) return {};
  auto* runs = static_cast<LoraRun*>(scratch(kScratchLoraRuns, static_cast<size_t>(m) * sizeof(LoraRun)));
  int64_t tiles = 0;
  const int64_t count = cut_rows(loras, m, runs, &tiles), stride = tiles * 16;
  if (count == 0) return {};
  float* shrunk = static_cast<float*>(scratch(kScratchShrunk, static_cast<size_t>(m * stride) * 4));
  parallel_pieces(count * tiles, 1, [&](Pieces& pieces) {
    around([&] {
      for (int64_t begin, end; pieces.next(&begin, &end);)
        for (int64_t i = begin; i < end; ++i)
          if (i % tiles < runs[i / tiles].lora->a.tiles()) shrink_run(runs[i / tiles], i % tiles, shrunk, stride);
    });
  });
  return {loras, shrunk, stride};
}

}  // namespace FD_ISA
}  // namespace fd
