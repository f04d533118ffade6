// Blocks of 64 keys in the paged cache: where they are, and fetching those that are read next.
// All functions are static: simd.h gives the reason.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/tasks.h"
#include "kernels.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kUnits = kKeyBlock / kUnit;

// Keys [begin, end) of a sequence, from a kv head on; begin is a multiple of 64.
struct Span {
  int64_t sequence, kv_head, begin, end;
};

// The keys of a block as units of 16, in the first kv head of the span. next() goes to the next block, and at the end
// of the span to another one.
template <typename Element>
class Units {
 public:
  Units(const AttentionArgs& a, const Span& span, const Span& then) : a_(&a), then_(then) {
    enter(span);
    next();
  }

  void next() {
    if (left_ == 0) enter(then_);
    for (int64_t u = 0; u < kUnits && left_ > 0; ++u, --left_) {
      keys[u] = here();
      slot_ += kUnit;
      if (slot_ < block_size_) continue;
      slot_ = 0;
      ++table_;
    }
  }

  const Element* keys[kUnits];

 private:
  void enter(const Span& span) {
    const Cache& cache = *a_->cache;
    block_size_ = cache.block_size;
    padded_ = cache.dim_padded;
    block_elements_ = cache.parts * cache.block_elements;
    table_ = a_->tables + span.sequence * a_->table_width + span.begin / block_size_;
    slot_ = span.begin % block_size_;
    left_ = (span.end - span.begin + kUnit - 1) / kUnit;
    data_ =
        static_cast<const Element*>(cache.data) + cache.offset(a_->layer, 0, 0) + span.kv_head * block_size_ * padded_;
    std::fill_n(keys, kUnits, here());
  }

  const Element* here() const { return data_ + *table_ * block_elements_ + slot_ * padded_; }

  const AttentionArgs* a_;
  Span then_;
  const Element* data_;
  const int32_t* table_;
  int64_t block_size_, padded_, block_elements_, slot_, left_;
};

// The pieces of a block in all its kv heads, each of 16 keys or values, in their order in memory.
struct Places {
  int64_t heads, head_size, to_values;
  int64_t unit = 0, place = 0;

  // Returns how far the piece lies behind the keys of its unit in the first kv head.
  int64_t offset() const { return place < heads ? place * head_size : (place - heads) * head_size + to_values; }
  void next() {
    if (++place < 2 * heads) return;
    place = 0;
    ++unit;
  }
};

// What is fetched while a block is computed: the block that is read next to L1, and the one behind it to L2, where
// tiles make memory the bottleneck. On Emerald Rapids, decoding with long contexts reads 1.1 times as fast as with L1
// alone.
#if defined(__AMX_TILE__)
constexpr bool kFetchBeyond = true;
#else
constexpr bool kFetchBeyond = false;
#endif

// A block of keys of one kv head, as units of 16 keys. Of the last unit, slots behind the end of the sequence have
// values of 0, and keys that may be anything. `ahead`: as many pieces (Places) of the next block, to be fetched only
// where `fetch` is set; `beyond`: of the block behind that one.
template <typename Element>
struct KeyBlock {
  int64_t units;
  const Element *keys[kUnits], *values[kUnits];
  const Element *ahead[2 * kUnits], *beyond[2 * kUnits];
  bool fetch;
};

// Pieces [0, kWithScores) of a block are fetched with the scores, then those before kWithValues with the softmax, and
// the others with the values: evenly over the time of a block.
constexpr int64_t kWithScores = 3, kWithValues = 5;

// Fetches pieces, some lines at a time.
template <typename Element>
class Fetcher {
 public:
  Fetcher(const KeyBlock<Element>& block, int64_t first, int64_t end, int64_t padded)
      : block_(block), piece_(first), end_(block.fetch ? end : first), size_(kUnit * padded) {}

  // Always inline: g++ takes a function that only fetches for one without effect, and drops its calls.
  [[gnu::always_inline]] inline void next(int64_t lines) {
    for (; lines > 0 && piece_ != end_; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(block_.ahead[piece_] + at_), _MM_HINT_T0);
      if (kFetchBeyond) _mm_prefetch(reinterpret_cast<const char*>(block_.beyond[piece_] + at_), _MM_HINT_T1);
      at_ += kLine;
      if (at_ < size_) continue;
      at_ = 0;
      ++piece_;
    }
  }

  // Returns how many lines to fetch in each of so many steps.
  int64_t lines_of(int64_t steps) const { return ((end_ - piece_) * size_ / kLine + steps - 1) / steps; }

 private:
  static constexpr int64_t kLine = 64 / sizeof(Element);

  const KeyBlock<Element>& block_;
  int64_t piece_;
  const int64_t end_, size_;
  int64_t at_ = 0;
};

// Copies the values of `count` of 16 keys and makes the others 0: they may be those of an earlier request, and
// 0 x infinity is NaN.
static inline void copy_values(const float* from, int64_t padded, int64_t count, float* to) {
  std::memcpy(to, from, static_cast<size_t>(count * padded) * 4);
  std::memset(to + count * padded, 0, static_cast<size_t>((kUnit - count) * padded) * 4);
}

static inline void copy_values(const uint16_t* from, int64_t padded, int64_t count, uint16_t* to) {
  const int64_t whole = count / 2 * 2 * padded;
  std::memcpy(to, from, static_cast<size_t>(whole) * 2);
  std::memset(to + whole, 0, static_cast<size_t>(kUnit * padded - whole) * 2);
  if (count % 2 == 0) return;
  for (int64_t d = 0; d < padded; ++d) to[whole + d * 2] = from[whole + d * 2];
}

}  // namespace FD_ISA
}  // namespace fd
