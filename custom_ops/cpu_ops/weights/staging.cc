// Staging of new weights beside steps: the cut into pieces, threads of a low priority, and the pass that reads,
// converts, checks, fingerprints and packs each piece within a core's cache.
#include "weights/staging.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "runtime/cpu_features.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // source and result fit L2

void add(StageResult& total, const StageResult& piece) {
  for (int s = 0; s < 2; ++s) total.fingerprint.sums[s] += piece.fingerprint.sums[s];
  if (piece.problem <= total.problem) return;
  total.problem = piece.problem;
  total.error = piece.error;
}

// Ten nice values are a tenth of the weight (1024 of nice 0, 110 of nice 10: sched_prio_to_weight of the kernel).
// Beside steps that want all cores, the work gets a tenth of them. The whole process may have a nice value of its own.
constexpr int kMoreNice = 10;

void lower_priority() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kMoreNice);  // cut to 19 by the kernel
}

// Calls body on up to `threads` new threads of a low priority, and waits for all of them. Throws the first exception of
// a body, or the error of the system if no thread can be started. The priority of the calling thread is not changed.
void run_in_background(int threads, const std::function<void()>& body) {
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    lower_priority();
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads));
  try {
    for (int i = 0; i < threads; ++i) workers.emplace_back(run);
  } catch (...) {                // system_error or bad_alloc; threads that run must be joined
    if (workers.empty()) throw;  // with fewer threads the work takes longer
  }
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

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
  if (!kernels.check(bf16, values, value, n, result.fingerprint)) {
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

void stage(bool bf16, const StageItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) cut(items[i].region, i, bytes_of(items[i].kind), pieces);
  work_off(pieces, stop, results,
           [&](const Piece& piece) { return stage_piece(bf16, items[piece.item], piece.first, piece.count); });
}

void quantize(Weight* const* weights, int64_t count, const int32_t* stop) {
  std::vector<Piece> pieces;  // of column tiles
  std::vector<StageResult> unused(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    Weight& w = *weights[i];
    const int64_t step = std::max<int64_t>(1, kPieceBytes / (w.tile_elements() * 2));
    if (w.int8 == nullptr)
      w.int8 = static_cast<char*>(allocate_pages(static_cast<size_t>(w.tiles() * w.int8_tile_bytes())));
    if (w.int8 == nullptr) throw std::bad_alloc();
    for (int64_t tile = 0; tile < w.tiles(); tile += step)
      pieces.push_back({i, tile, std::min(step, w.tiles() - tile)});
  }
  const auto kernel = current_isa() >= Isa::kAvx512 ? avx512::quantize_tile : avx2::quantize_tile;
  work_off(pieces, stop, unused.data(), [&](const Piece& piece) {
    for (int64_t tile = piece.first; tile < piece.first + piece.count; ++tile) kernel(*weights[piece.item], tile);
    return StageResult{};
  });
}

}  // namespace fd
