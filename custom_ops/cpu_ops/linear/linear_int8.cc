// Linears with int8 weights and inputs of 16 bits. Compiled for AVX512_VNNI and for AVX2, which give the same bits.
//
// An output is one chain of fused multiply-adds over the groups of 64 k in order: float(sum of the group) times (scale
// of the input times scale of the weight). The sum of a group is exact (int8_groups.h). So its bits depend only on its
// own row of x and its own column of the weight.
#include "linear/linear_int8.h"

#include <algorithm>
#include <cstring>

#include "linear/int8_groups.h"
#include "linear/linear.h"
#include "linear/shrink.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

// Groups of two column tiles (2 KiB) that are fetched ahead where memory is the bottleneck: the multiplications of more
// rows keep the core from running ahead on its own.
constexpr int64_t kAhead = 4, kAheadOfFewRows = 2, kFewRows = 4;
// Bytes of the input rows of one pass over the weights, which share L2 with two pairs of column tiles.
constexpr int64_t kPassBytes = int64_t{512} << 10;
// Bytes of weights in one piece of work: enough to make the cost per piece small, few enough to share among threads.
constexpr int64_t kPieceBytes = int64_t{64} << 10;

// The weights of a pair of column tiles, and those of the pair that is computed next.
struct PairWeights {
  const char *w0, *w1, *next0, *next1;
};

// Where the groups that are prefetched begin, counted from the first group of a pair on; those of the next pair follow.
// part: of `parts` passes over the pair, each for other rows. With one pass memory is the bottleneck: a fixed distance
// ahead. Otherwise all passes together fetch the next pair.
template <int Rows>
int64_t ahead_of(int64_t group, int64_t groups, int64_t part, int64_t parts) {
  if (parts == 1) return group + std::min(Rows <= kFewRows ? kAheadOfFewRows : kAhead, groups);
  return groups + (part * groups + group) / parts;
}

// sums [Rows][2][16] = products of a block of Rows rows with two column tiles.
template <int Rows>
void multiply_rows(const InputGroups& input, int64_t block, const PairWeights& pair, int64_t part, int64_t parts,
                   LoraFetch& fetch, float* sums) {
  const int64_t groups = input.groups();
  std::memset(sums, 0, Rows * 32 * 4);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = g * kInt8GroupBytes, ahead = ahead_of<Rows>(g, groups, part, parts);
    const bool here = ahead < groups;
    const int64_t next = (here ? ahead : ahead - groups) * kInt8GroupBytes;
    fetch.go();
    add_group<Rows>(input, block, g, pair.w0 + at, pair.w1 + at, (here ? pair.w0 : pair.next0) + next,
                    (here ? pair.w1 : pair.next1) + next, sums);
  }
}

Expansion shrink(const InputGroups& input, int64_t m, const LoraRows& loras) {
  const int64_t ldx = input.groups() * kInt8Group;
  const auto shrink_run = [&](const LoraRun& run, int64_t tile, float* shrunk, int64_t stride) {
    float* x = static_cast<float*>(scratch(kScratchLoraInput, static_cast<size_t>(run.rows * ldx) * 4));
    for (int64_t i = 0; i < run.rows; ++i) input.get(run.row + i, x + i * ldx);
    for (int64_t i = 0; i < run.rows; i += kRows)
      with_rows<kRows>(run.rows - i, [&](auto rows) {
        shrink_rows<decltype(rows)::value>(*run.lora, tile, x + i * ldx, ldx, shrunk + (run.row + i) * stride, stride);
      });
  };
  return shrink_all(loras, m, [](const auto& work) { work(); }, shrink_run);
}

// Calls finish(row, pair, value of its first tile, value of its second) for every row and every pair of column tiles.
template <typename Pairs, typename Finish>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, Finish finish) {
  const InputGroups input(rows.data, rows.m, w);
  const Expansion expansion = shrink(input, rows.m, loras);
  const int64_t tile_bytes = w.int8_tile_bytes();
  const int64_t most = std::max<int64_t>(1, kPassBytes / (input.groups() * input.group_bytes()));
  const int64_t passes = (input.blocks() + most - 1) / most;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t begin_block = input.blocks() * pass / passes;
    const int64_t parts = input.blocks() * (pass + 1) / passes - begin_block;
    const int64_t grain = std::max<int64_t>(1, kPieceBytes / (2 * tile_bytes * parts));
    parallel_for(pairs.count(), grain, [&](int64_t begin, int64_t end) {
      alignas(64) float sums[kRows * 32];
      for (int64_t pair = begin; pair < end; ++pair) {
        const int64_t next = std::min(pair + 1, pairs.count() - 1), tile0 = pairs.first(pair),
                      tile1 = pairs.second(pair);
        const PairWeights weights = {w.int8 + tile0 * tile_bytes, w.int8 + tile1 * tile_bytes,
                                     w.int8 + pairs.first(next) * tile_bytes, w.int8 + pairs.second(next) * tile_bytes};
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t block = begin_block + part, first = block * input.width();
          const int64_t last = std::min(rows.m, first + input.width());
          LoraFetch fetch = {};
          if (expansion.shrunk != nullptr) fetch = expansion.fetch(first, last, tile0, tile1, input.groups());
          with_rows<kRows>(input.width(), [&](auto width) {
            multiply_rows<decltype(width)::value>(input, block, weights, part, parts, fetch, sums);
          });
          for (int64_t row = first; row < last; ++row) {
            const float* c = sums + (row - first) * 32;
            const Floats16 value0 = complete(w, expansion, row, tile0, load(c));
            finish(row, pair, value0, complete(w, expansion, row, tile1, load(c + 16)));
          }
        }
      }
    });
  }
}

LinearInput make_int8_input(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m,
                            const Weight& w) {
  void* data = scratch(slot, InputGroups::bytes(m, w));
  const InputGroups input(data, m, w);
  // Rows of a block lie in the same cache lines. So one thread fills a group of a block.
  const int64_t groups = input.groups(), width = input.width();
  parallel_for(input.blocks() * groups, std::max<int64_t>(1, 16384 / (kInt8Group * width)),
               [&](int64_t begin, int64_t end) {
                 float factors[kRows];
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t g = item % groups, first = item / groups * width, last = std::min(m, first + width);
                   if (norm != nullptr && (item == begin || g == 0))
                     for (int64_t r = first; r < last; ++r) factors[r - first] = norm_factor(x + r * w.k, w.k, eps);
                   const int64_t at = g * kInt8Group, count = std::min(kInt8Group, w.k - at);
                   for (int64_t r = first; r < last; ++r) {
                     alignas(64) float values[kInt8Group] = {};
                     for (int64_t i = 0; i < count; i += 16) {
                       const int n = static_cast<int>(std::min<int64_t>(16, count - i));
                       Floats16 v = load_n(x + r * w.k + at + i, n);
                       if (norm != nullptr) v = mul(mul(v, set1(factors[r - first])), load_n(norm + at + i, n));
                       store(values + i, v);  // zeros behind the end; a load waits long for what a masked store wrote
                     }
                     input.put(r, g, values);
                   }
                 }
               });
  return {data, m};
}

void multiply_int8(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate) {
  const Neighbours pairs = {w.tiles()};
  for_all_pairs(input, w, loras, pairs, [&](int64_t row, int64_t pair, Floats16 c0, Floats16 c1) {
    float* to = out + row * w.n;
    const auto put = accumulate ? add_columns : store_columns;
    put(to, 2 * pair, w.n, c0);
    if (2 * pair + 1 < pairs.tiles) put(to, 2 * pair + 1, w.n, c1);
  });
}

// The scale of a group of the result is known when all its columns are. So they are stored as float32 first.
LinearInput multiply_gated_int8(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                                Activation activation, const Weight& next) {
  const int64_t half = w.n / 2, m = input.m;
  float* inner = static_cast<float*>(scratch(kScratchGateUp, static_cast<size_t>(m * half) * 4));
  for_all_pairs(input, w, loras, Halves{half / kColumns}, [&](int64_t row, int64_t pair, Floats16 gate, Floats16 up) {
    store(inner + row * half + pair * kColumns, gated(activation, gate, up));
  });
  return make_int8_input(slot, inner, nullptr, 0, m, next);
}

}  // namespace

extern const LinearKernels kInt8Linears = {make_int8_input, multiply_int8, multiply_gated_int8};

}  // namespace FD_ISA
}  // namespace fd
