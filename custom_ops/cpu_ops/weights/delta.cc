// Deltas of packed weights (fastdeploy/core/delta_format.py), and copies of rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/memory.h"
#include "weights/elements.h"
#include "weights/staging.h"

namespace fd {
namespace {

constexpr int64_t kSliceBytes = 64 << 10;  // gaps of an overwrite, for one thread
constexpr uint8_t kSkip = 255;             // the byte of a gap that goes on

// u4 count, values[count], gaps.
struct Overwrite {
  const char* values;
  const uint8_t* gaps;
  int64_t count = 0, gap_bytes = 0;

  // False if the payload has not the size that it tells, or ends within a gap.
  bool read(const DeltaItem& item, int64_t value_bytes) {
    if (item.payload_bytes < 4) return false;
    count = load_at<uint32_t>(item.payload, 0);
    values = item.payload + 4;
    gaps = reinterpret_cast<const uint8_t*>(values + count * value_bytes);
    gap_bytes = item.payload_bytes - 4 - count * value_bytes;
    return gap_bytes >= count && (gap_bytes == 0 || gaps[gap_bytes - 1] != kSkip);
  }
};

// Sums over a slice of gaps: of its bytes, and of the values whose gap ends in it.
struct Advance {
  uint64_t index;
  int64_t values;
};

// A flat position in the tensor of a region. T: the bits of a value in the dtype of the ops.
template <typename T>
class Cursor {
 public:
  explicit Cursor(const Region& region) : region_(region) {
    if (region.experts == 0) enter_row();
  }

  // Returns the address of the value that lies `gap` behind the last one.
  T* advance(int64_t gap) {
    if (region_.experts > 0) return advance_in_experts(gap);
    column_ += gap;
    if (column_ >= region_.columns) {
      row_ += column_ / region_.columns;
      column_ %= region_.columns;
      enter_row();
    }
    if (region_.linear == nullptr) return values_ + column_ * kPerFloat;
    return values_ + within_row(column_);
  }

 private:
  static constexpr int64_t kPerFloat = 4 / sizeof(T);

  static int64_t within_row(int64_t column) {
    return kPerFloat == 2 ? column / 2 * 32 + column % 2 : column * kColumns;
  }

  // row_: the columns before, of all experts; column_: the row of an expert.
  T* advance_in_experts(int64_t gap) {
    column_ += gap;
    row_ += column_ / region_.rows_of_expert();
    column_ %= region_.rows_of_expert();
    return row_of_linear(region_.linear_row(row_ / region_.columns, column_)) + within_row(row_ % region_.columns);
  }

  T* row_of_linear(int64_t row) const {
    const Weight& w = *region_.linear;
    return static_cast<T*>(w.data) + row / kColumns * w.tile_elements() + row % kColumns * kPerFloat;
  }

  void enter_row() {
    if (region_.linear == nullptr) {  // the upper half of a float has the bits of a bfloat16
      values_ = reinterpret_cast<T*>(region_.vector + row_ * region_.columns) + kPerFloat - 1;
      return;
    }
    values_ = row_of_linear(region_.first_row + row_);
  }

  const Region& region_;
  T* values_;
  int64_t row_ = 0, column_ = 0;
};

// Sums up a slice of gaps, and checks as many values. Nothing is written to the region before all slices were checked.
template <typename T>
Problem check_slice(const Overwrite& delta, const Piece& slice, Advance& sum) {
  constexpr T kInfinity = static_cast<T>(sizeof(T) == 2 ? 0x7f80 : 0x7f800000);
  constexpr T kMagnitude = static_cast<T>(sizeof(T) == 2 ? 0x7fff : 0x7fffffff);
  const int64_t end = slice.first + slice.count;
  uint32_t total = 0, ends = 0, standing = 0;  // at most 255 * kSliceBytes
  for (int64_t i = slice.first; i < end; ++i) {
    const bool goes_on = delta.gaps[i] == kSkip, begins = i > 0 && delta.gaps[i - 1] != kSkip;
    total += delta.gaps[i];
    ends += !goes_on;
    standing += begins && delta.gaps[i] == 0;
  }
  sum = {total, ends};
  T largest = 0;
  for (int64_t i = slice.first; i < std::min(end, delta.count); ++i)
    largest = std::max(largest, static_cast<T>(load_at<T>(delta.values, i) & kMagnitude));
  if (standing > 0) return Problem::kMalformed;
  return largest < kInfinity ? Problem::kNone : Problem::kNotFinite;
}

// Writes the values whose gaps end in a slice. before: the sums over all earlier slices.
template <typename T>
Fingerprint write_slice(const Region& region, const Overwrite& delta, const Piece& slice, const Advance& before) {
  constexpr int64_t kBatch = 64;  // values whose cache lines are fetched at the same time
  Cursor<T> cursor(region);
  Fingerprint total = {};
  BlockSums block;
  cursor.advance(static_cast<int64_t>(before.index));
  uint64_t index = before.index, gap = 0;
  int64_t number = before.values;
  for (int64_t at = slice.first, end = slice.first + slice.count; at < end;) {
    T* targets[kBatch];
    uint64_t indices[kBatch];
    int64_t n = 0;
    for (; n < kBatch && at < end; ++at) {
      gap += delta.gaps[at];
      if (delta.gaps[at] == kSkip) continue;
      targets[n] = cursor.advance(static_cast<int64_t>(gap));
      indices[n] = index += gap;
      __builtin_prefetch(targets[n++], 1);
      gap = 0;
    }
    for (int64_t i = 0; i < n; ++i) {
      const T value = load_at<T>(delta.values, number++), old = std::exchange(*targets[i], value);
      const uint64_t difference = uint64_t{value} - uint64_t{old};
      const uint64_t word = sizeof(T) == 2 ? indices[i] / 2 : indices[i], offset = word % kFingerprintBlock;
      const uint64_t weighted = sizeof(T) == 2 ? difference << (indices[i] % 2 * 16) : difference;
      if (static_cast<int64_t>(word / kFingerprintBlock) != block.block)
        block.move_to(static_cast<int64_t>(word / kFingerprintBlock), total);
      for (int s = 0; s < 2; ++s) block.sums.sums[s] += weighted * kWordKeys.keys[s][offset];
    }
  }
  block.move_to(0, total);
  return total;
}

template <typename T>
void overwrite(const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  std::vector<Overwrite> deltas(static_cast<size_t>(count));
  std::vector<Piece> pieces;  // of the bytes of gaps
  for (int64_t i = 0; i < count; ++i) {
    if (!deltas[i].read(items[i], sizeof(T))) results[i].problem = Problem::kMalformed;
    for (int64_t at = 0; results[i].problem == Problem::kNone && at < deltas[i].gap_bytes; at += kSliceBytes)
      pieces.push_back({i, at, std::min(kSliceBytes, deltas[i].gap_bytes - at)});
  }
  std::vector<Advance> sums(pieces.size());
  const auto number_of = [&](const Piece& piece) { return static_cast<size_t>(&piece - pieces.data()); };
  work_off(pieces, stop, results, [&](const Piece& piece) {
    return StageResult{{}, check_slice<T>(deltas[piece.item], piece, sums[number_of(piece)]), 0};
  });
  std::vector<Advance> before(pieces.size());  // of each slice
  Advance after = {};
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t item = pieces[i].item;
    before[i] = pieces[i].first == 0 ? Advance{} : after;
    after = {before[i].index + sums[i].index, before[i].values + sums[i].values};
    const bool last = i + 1 == pieces.size() || pieces[i + 1].item != item;
    const bool fits = after.index < static_cast<uint64_t>(items[item].region.size());
    if (!fits || (last && after.values != deltas[item].count))
      results[item].problem = std::max(results[item].problem, Problem::kMalformed);
  }
  std::vector<bool> refused(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) refused[i] = results[i].problem != Problem::kNone;
  work_off(pieces, stop, results, [&](const Piece& piece) {
    if (refused[piece.item]) return StageResult{};
    const Fingerprint change =
        write_slice<T>(items[piece.item].region, deltas[piece.item], piece, before[number_of(piece)]);
    return StageResult{change, Problem::kNone, 0};
  });
}

void copy_piece(Weight& target, const Weight& source, int64_t first, int64_t count) {
  const int64_t bytes = target.bf16 ? 2 : 4;
  if (first % kColumns == 0 && (count % kColumns == 0 || first + count == target.n)) {
    const int64_t at = first / kColumns * target.tile_elements() * bytes;
    const int64_t tiles = (count + kColumns - 1) / kColumns;
    std::memcpy(static_cast<char*>(target.data) + at, static_cast<const char*>(source.data) + at,
                static_cast<size_t>(tiles * target.tile_elements() * bytes));
    return;
  }
  void* values = scratch(kScratchInput, static_cast<size_t>(count * target.k * bytes));
  row_kernels().unpack(source, first, count, values);
  row_kernels().pack(target, first, count, values);
}

}  // namespace

void apply_deltas(bool bf16, const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  bf16 ? overwrite<uint16_t>(items, count, stop, results) : overwrite<uint32_t>(items, count, stop, results);
}

void copy_rows(Weight& target, const Weight& source, int64_t first, int64_t last) {
  constexpr int32_t kNeverStop = 0;
  std::vector<Piece> pieces;
  cut({last - first, target.k, &target, first, nullptr}, 0, target.bf16 ? 2 : 4, pieces);
  StageResult unused = {};
  work_off(pieces, &kNeverStop, &unused, [&](const Piece& piece) {
    copy_piece(target, source, first + piece.first, piece.count);
    return StageResult{};
  });
  if (target.bias != nullptr)
    std::memcpy(target.bias + first, source.bias + first, static_cast<size_t>(last - first) * 4);
}

}  // namespace fd
