// Deltas of packed weights (fastdeploy/core/delta_format.py), and copies of rows.
#include <algorithm>
#include <cstring>

#include "elements.h"
#include "memory.h"
#include "staging.h"

namespace fd {
namespace {

constexpr int64_t kSliceValues = 64 << 10;  // of an overwrite, for one thread

// u4 count, u4 gaps[count], values[count].
struct Overwrite {
  const char *gaps, *values;
  int64_t count = 0;

  // False if the payload has not the size that it tells.
  bool read(const DeltaItem& item, int64_t value_bytes) {
    if (item.payload_bytes < 4) return false;
    count = load_at<uint32_t>(item.payload, 0);
    gaps = item.payload + 4;
    values = gaps + 4 * count;
    return item.payload_bytes == 4 + count * (4 + value_bytes);
  }
};

// A flat position in a region, and the packed value there. T: the bits of a value in the dtype of the ops.
template <typename T>
class Cursor {
 public:
  explicit Cursor(const Region& region) : region_(region) {}

  void advance(int64_t gap) {
    column_ += gap;
    if (column_ < region_.columns && tile_ != nullptr) return;
    row_ += column_ / region_.columns;
    column_ %= region_.columns;
    if (region_.linear == nullptr) return;
    const Weight& w = *region_.linear;
    const int64_t row = region_.first_row + row_, lane = row % kColumns;
    tile_ = static_cast<T*>(w.data) + row / kColumns * w.tile_elements() + lane * (sizeof(T) == 2 ? 2 : 1);
  }

  // Sets the value and returns the old one.
  T exchange(T value) {
    if (tile_ == nullptr) return exchange_in_vector(value);
    T* at = sizeof(T) == 2 ? tile_ + column_ / 2 * 32 + column_ % 2 : tile_ + column_ * kColumns;
    const T old = *at;
    *at = value;
    return old;
  }

 private:
  T exchange_in_vector(T value) {
    char* at = reinterpret_cast<char*>(region_.vector + row_ * region_.columns + column_);
    const uint32_t shift = sizeof(T) == 2 ? 16 : 0, bits = static_cast<uint32_t>(value) << shift;
    const T old = static_cast<T>(load_at<uint32_t>(at, 0) >> shift);
    std::memcpy(at, &bits, 4);
    return old;
  }

  const Region& region_;
  T* tile_ = nullptr;  // the row's values in its tile; null: a vector
  int64_t row_ = 0, column_ = 0;
};

// Adds the gaps of a slice to *distance. Nothing is written to the region before all slices were checked.
template <typename T>
Problem check_slice(const Overwrite& delta, int64_t first, int64_t count, uint64_t* distance) {
  constexpr T kInfinity = static_cast<T>(sizeof(T) == 2 ? 0x7f80 : 0x7f800000);
  constexpr T kMagnitude = static_cast<T>(sizeof(T) == 2 ? 0x7fff : 0x7fffffff);
  uint64_t sum = 0;
  uint32_t shortest = UINT32_MAX;
  T largest = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const uint32_t gap = load_at<uint32_t>(delta.gaps, i);
    sum += gap;
    shortest = std::min(shortest, i == 0 ? 1 : gap);
    largest = std::max(largest, static_cast<T>(load_at<T>(delta.values, i) & kMagnitude));
  }
  *distance = sum;
  if (shortest == 0) return Problem::kMalformed;
  return largest < kInfinity ? Problem::kNone : Problem::kNotFinite;
}

// Writes a slice of an overwrite. index: the flat index of the value before it.
template <typename T>
Fingerprint write_slice(const Region& region, const Overwrite& delta, const Piece& slice, uint64_t index) {
  Cursor<T> cursor(region);
  Fingerprint total = {};
  BlockSums block;
  cursor.advance(static_cast<int64_t>(index));
  for (int64_t i = slice.first; i < slice.first + slice.count; ++i) {
    const uint32_t gap = load_at<uint32_t>(delta.gaps, i);
    const T value = load_at<T>(delta.values, i);
    cursor.advance(gap);
    index += gap;
    uint64_t difference = uint64_t{value} - uint64_t{cursor.exchange(value)};
    if (sizeof(T) == 2) difference <<= index % 2 * 16;
    const int64_t word = static_cast<int64_t>(sizeof(T) == 2 ? index / 2 : index);
    if (word / kFingerprintBlock != block.block) block.move_to(word / kFingerprintBlock, total);
    for (int s = 0; s < 2; ++s) block.sums.sums[s] += difference * kWordKeys.keys[s][word % kFingerprintBlock];
  }
  block.move_to(0, total);
  return total;
}

template <typename T>
void overwrite(const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  std::vector<Overwrite> deltas(static_cast<size_t>(count));
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) {
    if (items[i].encoding != Encoding::kOverwrite) continue;
    if (!deltas[i].read(items[i], sizeof(T))) results[i].problem = Problem::kMalformed;
    for (int64_t at = 0; results[i].problem == Problem::kNone && at < deltas[i].count; at += kSliceValues)
      pieces.push_back({i, at, std::min(kSliceValues, deltas[i].count - at)});
  }
  std::vector<uint64_t> distances(pieces.size());
  work_off(pieces, stop, results, [&](const Piece& piece) {
    uint64_t* distance = &distances[static_cast<size_t>(&piece - pieces.data())];
    return StageResult{{}, check_slice<T>(deltas[piece.item], piece.first, piece.count, distance), 0};
  });
  std::vector<uint64_t> starts(pieces.size());  // the flat index of the value before each slice
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t item = pieces[i].item;
    starts[i] = pieces[i].first == 0 ? 0 : starts[i - 1] + distances[i - 1];
    const bool inside = starts[i] + distances[i] < static_cast<uint64_t>(items[item].region.size());
    if (!inside) results[item].problem = std::max(results[item].problem, Problem::kMalformed);
  }
  std::vector<bool> refused(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) refused[i] = results[i].problem != Problem::kNone;
  work_off(pieces, stop, results, [&](const Piece& piece) {
    if (refused[piece.item]) return StageResult{};
    const uint64_t start = starts[static_cast<size_t>(&piece - pieces.data())];
    return StageResult{write_slice<T>(items[piece.item].region, deltas[piece.item], piece, start), Problem::kNone, 0};
  });
}

// The values of a piece as scratch. A piece of a linear is rows, a piece of a vector is values.
char* current_values(bool bf16, const Region& region, const Piece& piece, int64_t n) {
  char* values = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(n * (bf16 ? 2 : 4))));
  const RowKernels& kernels = row_kernels();
  if (region.linear != nullptr) {
    kernels.unpack(*region.linear, region.first_row + piece.first, piece.count, values);
  } else {
    kernels.convert(Kind::kF32, region.vector + piece.first, n, bf16, values);
  }
  return values;
}

// Replaces all values of a piece by those of the payload, or by their xor with it.
StageResult replace(bool bf16, const DeltaItem& item, const Piece& piece) {
  const Region& region = item.region;
  const RowKernels& kernels = row_kernels();
  const int64_t columns = region.linear != nullptr ? region.columns : 1;
  const int64_t n = piece.count * columns, first = piece.first * columns, value_bytes = bf16 ? 2 : 4;
  const char* values = item.payload + first * value_bytes;
  char* old = current_values(bf16, region, piece, n);
  Fingerprint before = {};
  StageResult result = {};
  kernels.check(bf16, old, first, n, before);
  if (item.encoding == Encoding::kXor) {
    for (int64_t i = 0; i < n * value_bytes; ++i) old[i] = static_cast<char>(old[i] ^ values[i]);
    values = old;
  }
  if (!kernels.check(bf16, values, first, n, result.fingerprint)) return {{}, Problem::kNotFinite, 0};
  for (int s = 0; s < 2; ++s) result.fingerprint.sums[s] -= before.sums[s];
  if (region.linear != nullptr) {
    kernels.pack(*region.linear, region.first_row + piece.first, piece.count, values);
  } else {
    kernels.convert(bf16 ? Kind::kBf16 : Kind::kF32, values, n, false, region.vector + piece.first);
  }
  return result;
}

void replace_all(bool bf16, const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  const int64_t value_bytes = bf16 ? 2 : 4;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) {
    if (items[i].encoding == Encoding::kOverwrite) continue;
    if (items[i].payload_bytes == items[i].region.size() * value_bytes) {
      cut(items[i].region, i, value_bytes, pieces);
    } else {
      results[i].problem = Problem::kMalformed;
    }
  }
  work_off(pieces, stop, results, [&](const Piece& piece) { return replace(bf16, items[piece.item], piece); });
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
  replace_all(bf16, items, count, stop, results);
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
