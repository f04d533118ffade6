// Staging of new weights beside steps: the pieces of the work, and the kernels on rows of packed weights.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels.h"
#include "weights/fingerprint.h"

namespace fd {

// Problem of ops/interface.py, from the least to the most severe: the worst of an item's pieces is reported.
enum class Problem : int64_t { kNone, kTooLarge, kNotFinite, kCutShort, kReadError, kMalformed, kStopped };

// Types of a source.
enum class Kind : int64_t { kF32, kBf16, kF16 };

constexpr int64_t bytes_of(Kind kind) { return kind == Kind::kF32 ? 4 : 2; }

// Region of ops/interface.py. `linear` and `vector` may be null.
struct Region {
  int64_t rows, columns;
  Weight* linear;
  int64_t first_row;
  float* vector;
  int64_t experts = 0, interleaved = 0;

  int64_t size() const { return rows * columns; }
  int64_t rows_of_expert() const { return rows / experts; }

  // The row of the linear that has the stored row `row` of an expert.
  int64_t linear_row(int64_t expert, int64_t row) const {
    const int64_t of_expert = rows_of_expert(), half = of_expert / 2;
    return first_row + expert * of_expert + (interleaved ? row % 2 * half + row / 2 : row);
  }
};

// StageItem of ops/interface.py. memory: null, or all of an array of `memory_bytes`. stride, run, step: of a View,
// whose region is a linear; 0 = none.
struct StageItem {
  Region region;
  Kind kind;
  int64_t offset, fd;
  const char* memory;
  int64_t memory_bytes;
  int64_t stride, run, step;

  // Values, and bytes of the source, that one count of a piece stands for: a row of a linear, or a value.
  int64_t unit() const { return region.linear != nullptr ? region.columns : 1; }
  int64_t unit_bytes() const { return unit() * bytes_of(kind); }

  // The index in the source of (row, column) of a view.
  int64_t viewed(int64_t row, int64_t column) const { return column * stride + row / run * step + row % run; }
};

// DeltaItem of ops/interface.py.
struct DeltaItem {
  Region region;
  const char* payload;
  int64_t payload_bytes;
};

struct StageResult {
  Fingerprint fingerprint;
  Problem problem;
  int64_t error;  // errno
};

// A part of an item for one thread. What first and count count is up to the work. Of a view, a piece is a block: these
// columns of `count` rows.
struct Piece {
  int64_t item, first, count;
  int64_t first_column = 0, columns = 0;
};

// Appends the pieces of a region, of about 256 KiB: values; or, of a linear, rows. Pieces of one region have no column
// tile in common.
void cut(const Region& region, int64_t item, int64_t value_bytes, std::vector<Piece>& pieces);

// Calls body for all pieces on threads that use idle cores, and adds what body returns to the results of the items. If
// they take long, threads that take a tenth of the cores help them: the more pieces are on_disk, the earlier.
// Once *stop is set, body is not called any more. Throws what body throws.
void work_off(const std::vector<Piece>& pieces, const int32_t* stop, StageResult* results,
              const std::function<StageResult(const Piece&)>& body, size_t on_disk = 0);

// Ops.stage, Ops.apply_deltas and Ops.copy_rows of ops/interface.py. bf16: the dtype of the ops.
void stage(bool bf16, const StageItem* items, int64_t count, const int32_t* stop, StageResult* results);
void apply_deltas(bool bf16, const DeltaItem* items, int64_t count, const int32_t* stop, StageResult* results);
void copy_rows(Weight& target, const Weight& source, int64_t first, int64_t last);

// Ops.quantize of ops/interface.py, of bfloat16 weights. Throws bad_alloc.
void quantize(Weight* const* weights, int64_t count, const int32_t* stop);

// The kernels of one instruction set. `values` are in the dtype of the ops, in row-major order, at any address.
struct RowKernels {
  // Rounds `n` values of a source to nearest even.
  void (*convert)(Kind kind, const void* source, int64_t n, bool bf16, void* values);
  // Adds the fingerprint of the values [first, first + n) of a tensor. Returns whether all are finite.
  bool (*check)(bool bf16, const void* values, int64_t first, int64_t n, Fingerprint& sum);
  // out [rows, columns] = values [columns, rows], transposed. `columns` is even, or all columns of a weight.
  void (*transpose)(bool bf16, const void* values, int64_t rows, int64_t columns, void* out);
  // Copies values [n, columns] to the columns from `first_column` on of the rows [first, first + n) of a weight. Writes
  // no other element. first_column is even.
  void (*pack_block)(Weight& w, int64_t first, int64_t n, int64_t first_column, int64_t columns, const void* values);
  // Copies between values [n, w.k] and rows [first, first + n) of a weight. Writes no other element.
  void (*pack)(Weight& w, int64_t first, int64_t n, const void* values);
  void (*unpack)(const Weight& w, int64_t first, int64_t n, void* values);
};

namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}

const RowKernels& row_kernels();

}  // namespace fd
