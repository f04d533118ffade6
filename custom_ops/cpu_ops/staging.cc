#include "staging.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "background.h"
#include "cpu_features.h"
#include "thread_pool.h"

namespace fd {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // source and result fit L2

void add(StageResult& total, const StageResult& piece) {
  for (int s = 0; s < 2; ++s) total.fingerprint.sums[s] += piece.fingerprint.sums[s];
  if (piece.problem <= total.problem) return;
  total.problem = piece.problem;
  total.error = piece.error;
}

}  // namespace

const RowKernels& row_kernels() { return current_isa() >= Isa::kAvx512 ? avx512::kRowKernels : avx2::kRowKernels; }

void cut(const Region& region, int64_t item, int64_t value_bytes, std::vector<Piece>& pieces) {
  const bool rows = region.linear != nullptr;
  const int64_t end = rows ? region.rows : region.size();
  const int64_t unit_bytes = rows ? region.columns * value_bytes * kColumns : value_bytes;
  const int64_t units = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, unit_bytes));
  const int64_t step = rows ? units * kColumns : units;
  if (region.size() == 0) return;
  for (int64_t first = 0; first < end;) {
    // The first piece of rows ends where a column tile ends, and so do all others.
    const int64_t next = std::min(end, first + step - (rows ? (region.first_row + first) % kColumns : 0));
    pieces.push_back({item, first, next - first});
    first = next;
  }
}

void work_off(const std::vector<Piece>& pieces, const int32_t* stop, StageResult* results,
              const std::function<StageResult(const Piece&)>& body) {
  std::atomic<size_t> taken{0};
  std::mutex mutex;
  const auto work = [&] {
    for (size_t i; (i = taken.fetch_add(1)) < pieces.size();) {
      const bool stopped = __atomic_load_n(stop, __ATOMIC_RELAXED) != 0;
      const StageResult result = stopped ? StageResult{{}, Problem::kStopped, 0} : body(pieces[i]);
      std::lock_guard<std::mutex> lock(mutex);
      add(results[pieces[i].item], result);
    }
  };
  const size_t threads = std::min(pieces.size(), static_cast<size_t>(num_threads()));
  if (threads > 0) run_in_background(static_cast<int>(threads), work);
}

}  // namespace fd
