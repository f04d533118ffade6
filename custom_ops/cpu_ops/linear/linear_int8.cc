// Linears with int8 weights and inputs of 16 bits. Compiled for AMX, AVX512_VNNI and AVX2, which give the same bits.
//
// An output is one chain of fused multiply-adds over the groups of 64 k in order: float(sum of the group) times (scale
// of the input times scale of the weight). The sum of a group is exact (int8_groups.h). So its bits depend only on its
// own row of x and its own column of the weight.
#include "linear/linear_int8.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "linear/int8_groups.h"
#include "linear/int8_products.h"
#include "linear/linear.h"
#include "linear/shrink.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {
namespace {

// K is cut into this many groups, so that the weights of a pair of column tiles (8.5 KiB) stay in L1 for all rows.
// While a cut is computed, the weights of the next one are fetched. One block of rows needs no cut.
constexpr int64_t kCutGroups = 4;
// Bytes of the input rows of one pass over the weights, which share L2 with sums and the stream of weights.
constexpr int64_t kPassBytes = int64_t{1} << 20;
// Bytes of weights in one piece of work, times blocks of rows: enough to make the cost per piece small, few enough to
// share among threads.
constexpr int64_t kPieceBytes = int64_t{64} << 10;

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

// Multiplies all rows with all pairs of column tiles. `finish` says what is done with the products:
//
//   pairs_of_unit()                    how many neighbouring pairs one thread computes together
//   expect(row, rows, pair)            called some time before finish, for the same rows and pair
//   finish(row, rows, pair, values)    takes the results [rows][2][16] of rows [row, row + rows), a block
//   finish_unit(unit, block, blocks)   called when all pairs of a unit are finished for these blocks
template <typename Pairs, typename Finish>
void for_all_pairs(const LinearInput& rows, const Weight& w, const LoraRows& loras, Pairs pairs, const Finish& finish) {
  const InputGroups input(rows.data, rows.m, w);
  const Expansion expansion = shrink(input, rows.m, loras);
  const int64_t groups = input.groups(), width = input.width();
  const int64_t units = (pairs.count() + finish.pairs_of_unit() - 1) / finish.pairs_of_unit();
  const auto group_at = [&](int64_t tile, int64_t group) {
    return w.int8 + tile * w.int8_tile_bytes() + group * kInt8GroupBytes;
  };
  const int64_t most = std::max<int64_t>(1, kPassBytes / (groups * input.group_bytes()));
  const int64_t passes = (input.blocks() + most - 1) / most;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first_block = input.blocks() * pass / passes;
    const int64_t blocks = input.blocks() * (pass + 1) / passes - first_block;
    const int64_t cuts = blocks == 1 ? 1 : (groups + kCutGroups - 1) / kCutGroups;
    const auto cut_at = [&](int64_t cut) { return groups * cut / cuts; };
    const auto multiply_pair = [&](int64_t pair, float* sums) {
      const int64_t tile0 = pairs.first(pair), tile1 = pairs.second(pair);
      const int64_t next_pair = std::min(pair + 1, pairs.count() - 1);
      Int8Fetch fetch;
      std::memset(sums, 0, static_cast<size_t>(blocks * kBlockSums) * 4);
      for (int64_t i = 0; i < cuts; ++i) {
        const bool last = i + 1 == cuts;
        const int64_t first = cut_at(i), count = cut_at(i + 1) - first;
        const int64_t next = last ? 0 : first + count, next_end = cut_at(last ? 1 : i + 2);
        const Cut cut = {first_block, blocks, first, count, group_at(tile0, first), group_at(tile1, first)};
        fetch.tile[0] = group_at(last ? pairs.first(next_pair) : tile0, next);
        fetch.tile[1] = group_at(last ? pairs.second(next_pair) : tile1, next);
        fetch.bytes = (next_end - next) * kInt8GroupBytes;
        fetch.done = 0;
        const auto begin_block = [&](int64_t block) {
          const int64_t row = block * width, in_block = std::min(width, rows.m - row);
          if (!last || block == first_block + blocks) return;
          finish.expect(row, in_block, pair);
          if (expansion.shrunk != nullptr) fetch.loras = expansion.fetch(row, row + in_block, tile0, tile1, count);
        };
        const auto done = [&](int64_t block, float* values) {
          if (!last) return;
          const int64_t row = block * width, in_block = std::min(width, rows.m - row);
          complete_rows(w, expansion, row, in_block, tile0, tile1, values);
          finish.finish(row, in_block, pair, values);
          begin_block(block + 1);
        };
        begin_block(first_block);
        const BlockDone call = std::ref(done);
        with_rows<kRows>(
            width, [&](auto block_rows) { multiply_cut<decltype(block_rows)::value>(input, cut, fetch, sums, call); });
      }
    };
    const int64_t pair_bytes = 2 * w.int8_tile_bytes() * blocks;
    const int64_t grain = std::max<int64_t>(1, kPieceBytes / (pair_bytes * finish.pairs_of_unit()));
    parallel_pieces(units, grain, [&](Pieces& pieces) {
      const ProductState state(width);
      float* sums = static_cast<float*>(scratch(kScratchTiles, static_cast<size_t>(blocks * kBlockSums) * 4));
      for (int64_t begin, end; pieces.next(&begin, &end);)
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t pair = unit * finish.pairs_of_unit();
          for (int64_t i = pair; i < std::min(pair + finish.pairs_of_unit(), pairs.count()); ++i)
            multiply_pair(i, sums);
          finish.finish_unit(unit, first_block, blocks);
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
                   const int64_t g = item % groups, block = item / groups, first = block * width;
                   const int64_t count = std::min(width, m - first);
                   const float* rows = x + first * w.k;
                   if (norm != nullptr && (item == begin || g == 0))
                     for (int64_t i = 0; i < count; ++i) factors[i] = norm_factor(rows + i * w.k, w.k, eps);
                   const int64_t at = g * kInt8Group, depth = std::min(kInt8Group, w.k - at);
                   for (int64_t i = 0; i < count; ++i) {
                     const float* from = rows + i * w.k + at;
                     if (norm == nullptr && depth == kInt8Group) {
                       input.put(block, i, g, from);
                       continue;
                     }
                     alignas(64) float values[kInt8Group] = {};
                     for (int64_t k = 0; k < depth; k += 16) {
                       const int n = static_cast<int>(std::min<int64_t>(16, depth - k));
                       Floats16 v = load_n(from + k, n);
                       if (norm != nullptr) v = mul(mul(v, set1(factors[i])), load_n(norm + at + k, n));
                       store(values + k, v);  // zeros behind the end; a load waits long for what a masked store wrote
                     }
                     input.put(block, i, g, values);
                   }
                 }
               });
  return {data, m};
}

// Stores the products of neighbours to out [m, n], or adds them.
struct Stores {
  const Neighbours& pairs;
  float* out;
  int64_t n;
  bool accumulate;

  int64_t pairs_of_unit() const { return 1; }
  void expect(int64_t row, int64_t rows, int64_t pair) const {
    const float* to = out + row * n + 2 * pair * kColumns;
    for (int64_t r = 0; r < rows; ++r, to += n) {
      __builtin_prefetch(to, 1);
      __builtin_prefetch(to + kColumns, 1);
    }
  }
  void finish(int64_t row, int64_t rows, int64_t pair, const float* values) const {
    const auto put = accumulate ? add_columns : store_columns;
    float* to = out + row * n;
    for (int64_t r = 0; r < rows; ++r, to += n, values += 2 * kColumns) {
      put(to, 2 * pair, n, load(values));
      if (2 * pair + 1 < pairs.tiles) put(to, 2 * pair + 1, n, load(values + kColumns));
    }
  }
  void finish_unit(int64_t, int64_t, int64_t) const {}
};

void multiply_int8(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate) {
  const Neighbours pairs = {w.tiles()};
  for_all_pairs(input, w, loras, pairs, Stores{pairs, out, w.n, accumulate});
}

// Fills the input of the next linear with the activation of gate and up. The scale of a group of it is known when all
// its 64 columns are, which are those of a unit.
struct Gates {
  const InputGroups& next;
  int64_t m, half;
  Activation activation;

  int64_t pairs_of_unit() const { return kInt8Group / kColumns; }
  void expect(int64_t, int64_t, int64_t) const {}
  // The columns of a unit, for the rows of a block: [width][64].
  float* columns(int64_t block) const {
    const int64_t size = next.width() * kInt8Group;
    return static_cast<float*>(scratch(kScratchGateUp, static_cast<size_t>(next.blocks() * size) * 4)) + block * size;
  }
  void finish(int64_t row, int64_t rows, int64_t pair, const float* values) const {
    float* to = columns(row / next.width()) + pair % pairs_of_unit() * kColumns;
    for (int64_t r = 0; r < rows; ++r, to += kInt8Group, values += 2 * kColumns)
      store(to, gated(activation, load(values), load(values + kColumns)));
  }
  void finish_unit(int64_t unit, int64_t block, int64_t blocks) const {
    const int64_t filled = std::min(kInt8Group, half - unit * kInt8Group);
    for (int64_t end = block + blocks; block < end; ++block) {
      float* values = columns(block);
      const int64_t rows = std::min(next.width(), m - block * next.width());
      for (int64_t r = 0; r < rows; ++r, values += kInt8Group) {
        std::fill(values + filled, values + kInt8Group, 0.0f);
        next.put(block, r, unit, values);
      }
    }
  }
};

LinearInput multiply_gated_int8(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                                Activation activation, const Weight& next) {
  const int64_t half = w.n / 2, m = input.m;
  const InputGroups inner(scratch(slot, InputGroups::bytes(m, next)), m, next);
  for_all_pairs(input, w, loras, Halves{half / kColumns}, Gates{inner, m, half, activation});
  return {inner.data(), m};
}

}  // namespace

extern const LinearKernels kInt8Linears = {make_int8_input, multiply_int8, multiply_gated_int8};

}  // namespace FD_ISA
}  // namespace fd
