// Staging: one pass that reads, converts, checks, fingerprints and packs, piece by piece in a core's cache.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "memory.h"
#include "staging.h"

namespace fd {
namespace {

// Reads each byte once, since another process may be writing to the source.
StageResult read(const StageItem& item, int64_t first_byte, int64_t bytes, char* target) {
  const int64_t offset = item.offset + first_byte;
  if (item.memory != nullptr) {
    if (offset + bytes > item.memory_bytes) return {{}, Problem::kCutShort, 0};
    std::memcpy(target, item.memory + offset, static_cast<size_t>(bytes));
    return {};
  }
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(static_cast<int>(item.fd), target + done, static_cast<size_t>(bytes - done), offset + done);
    if (n == 0) return {{}, Problem::kCutShort, 0};
    if (n > 0) done += n;
    if (n < 0 && errno != EINTR) return {{}, Problem::kReadError, errno};
  }
  return {};
}

StageResult stage_piece(bool bf16, const StageItem& item, int64_t first, int64_t count) {
  const Region& region = item.region;
  const RowKernels& kernels = row_kernels();
  const int64_t columns = region.linear != nullptr ? region.columns : 1;
  const int64_t n = count * columns, value = first * columns;
  char* source = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(n * bytes_of(item.kind))));
  StageResult result = read(item, value * bytes_of(item.kind), n * bytes_of(item.kind), source);
  if (result.problem != Problem::kNone) return result;
  char* values = source;
  if (item.kind != (bf16 ? Kind::kBf16 : Kind::kF32)) {
    values = static_cast<char*>(scratch(kScratchInner, static_cast<size_t>(n * (bf16 ? 2 : 4))));
    kernels.convert(item.kind, source, n, bf16, values);
  }
  if (!kernels.check(bf16, values, item.first + value, n, result.fingerprint)) {
    // Only the rounding of float32 to bfloat16 makes a finite value infinite.
    Fingerprint unused = {};
    const bool rounded = bf16 && item.kind == Kind::kF32 && kernels.check(false, source, 0, n, unused);
    result.problem = rounded ? Problem::kTooLarge : Problem::kNotFinite;
  } else if (region.linear != nullptr) {
    kernels.pack(*region.linear, region.first_row + first, count, values);
  } else if (region.vector != nullptr) {
    kernels.convert(bf16 ? Kind::kBf16 : Kind::kF32, values, n, false, region.vector + first);
  }
  return result;
}

}  // namespace

void stage(bool bf16, const StageItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) cut(items[i].region, i, bytes_of(items[i].kind), pieces);
  work_off(pieces, stop, results,
           [&](const Piece& piece) { return stage_piece(bf16, items[piece.item], piece.first, piece.count); });
}

}  // namespace fd
