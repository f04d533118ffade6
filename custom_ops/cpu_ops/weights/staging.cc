// Staging of new weights beside steps: the cut into pieces, threads of a low priority, and the pass that reads,
// converts, checks, fingerprints and packs each piece within a core's cache.
#include "weights/staging.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <numeric>
#include <thread>
#include <tuple>

#include "runtime/cpu_features.h"
#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // source and result fit L2
// A block of a view: runs of 2 KiB of bfloat16 are read, and sums of 256 values are made.
constexpr int64_t kBlockRows = 1024, kBlockColumns = 256;

void add(StageResult& total, const StageResult& piece) {
  for (int s = 0; s < 2; ++s) total.fingerprint.sums[s] += piece.fingerprint.sums[s];
  if (piece.problem <= total.problem) return;
  total.problem = piece.problem;
  total.error = piece.error;
}

// Ten nice values are a tenth of the weight (1024 of nice 0, 110 of nice 10: sched_prio_to_weight of the kernel). The
// whole process may have a nice value of its own.
constexpr int kMoreNice = 10;

// How long threads of SCHED_IDLE may take for one piece on average, before others help them. 1 GB is some 3,800 pieces.
constexpr std::chrono::microseconds kPatience{250};

enum class Priority { kIdle, kNice };

void lower_priority(Priority priority) {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kMoreNice);  // cut to 19 by the kernel
  const sched_param unused = {};
  if (priority == Priority::kIdle) sched_setscheduler(0, SCHED_IDLE, &unused);  // the calling thread
}

// Threads that call `body` with a low priority. The priority of the calling thread is not changed.
class BackgroundThreads {
 public:
  explicit BackgroundThreads(const std::function<void()>& body) : body_(body) {}

  // Starts up to `threads` more. Throws the error of the system if none of all can be started.
  void start(int threads, Priority priority) {
    try {
      for (int i = 0; i < threads; ++i) workers_.emplace_back([this, priority] { run(priority); });
    } catch (...) {                 // system_error or bad_alloc; threads that run must be joined
      if (workers_.empty()) throw;  // with fewer threads the work takes longer
    }
  }

  // Waits until all have ended, or until the time is over. Returns whether all have ended.
  bool wait_for(std::chrono::microseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return ended_ == workers_.size(); });
  }

  // Waits for all of them, and throws the first exception of a body.
  void join() {
    for (std::thread& worker : workers_) worker.join();
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void run(Priority priority) {
    lower_priority(priority);
    std::exception_ptr failure;
    try {
      body_();
    } catch (...) {
      failure = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = failure;
    ++ended_;
    changed_.notify_one();
  }

  const std::function<void()>& body_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t ended_ = 0;
  std::exception_ptr failure_;
};

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

// How many pages of a file are in the page cache; -1 where the system does not tell (Linux before 6.5).
int64_t cached_pages(int64_t fd, int64_t offset, int64_t bytes) {
  constexpr long kCachestat = 451;  // the same on all architectures
  struct {
    uint64_t offset, bytes;
  } range = {static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes)};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } found = {};
  return syscall(kCachestat, static_cast<unsigned>(fd), &range, &found, 0) == 0 ? static_cast<int64_t>(found.cached)
                                                                                : -1;
}

// Lets the system read files from a disk while the threads pack: a thread of a low priority that has waited for a read
// also waits for its next turn on a core, and the disk rests meanwhile.
class ReadAhead {
 public:
  ReadAhead(const StageItem* items, const std::vector<Piece>& pieces)
      : items_(items), pieces_(pieces), missing_(pieces.size()) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const StageItem& item = items[pieces[i].item];
      if (item.memory != nullptr || bytes(pieces[i]) == 0) continue;
      const int64_t cached = cached_pages(item.fd, offset(pieces[i]), bytes(pieces[i]));
      missing_[i] = cached < bytes(pieces[i]) / kPageBytes;
      if (missing_[i] && cached >= 0) ++on_disk_;
    }
    for (size_t i = 0; i < kAhead; ++i) start(i);
  }

  // Pieces that are not in the page cache. Their CPU time is some three times that of others, mostly for new pages.
  size_t on_disk() const { return on_disk_; }

  // Called once for each piece, when a thread takes it.
  void reached(size_t piece) const { start(piece + kAhead); }

 private:
  static constexpr size_t kAhead = (64 << 20) / kPieceBytes;  // of a disk that reads 1 GB/s, the work of 60 ms
  static constexpr int64_t kPageBytes = 4096;

  // Of a view, the first block of some columns stands for all that the source has of them.
  int64_t bytes(const Piece& piece) const {
    const StageItem& item = items_[piece.item];
    if (item.stride == 0) return piece.count * item.unit_bytes();
    return piece.first == 0 ? ((piece.columns - 1) * item.stride + piece.count) * bytes_of(item.kind) : 0;
  }

  int64_t offset(const Piece& piece) const {
    const StageItem& item = items_[piece.item];
    if (item.stride != 0) return item.offset + item.viewed(piece.first, piece.first_column) * bytes_of(item.kind);
    return item.offset + piece.first * item.unit_bytes();
  }

  void start(size_t i) const {
    if (i >= pieces_.size() || !missing_[i]) return;
    const int fd = static_cast<int>(items_[pieces_[i].item].fd);
    posix_fadvise(fd, offset(pieces_[i]), bytes(pieces_[i]), POSIX_FADV_WILLNEED);
  }

  const StageItem* items_;
  const std::vector<Piece>& pieces_;
  std::vector<bool> missing_;
  size_t on_disk_ = 0;
};

// The problem of values that are not all finite in the dtype of the ops.
Problem problem_of(bool bf16, Kind kind, const char* source, int64_t n) {
  // Only the rounding of float32 to bfloat16 makes a finite value infinite.
  Fingerprint unused = {};
  const bool rounded = bf16 && kind == Kind::kF32 && row_kernels().check(false, source, 0, n, unused);
  return rounded ? Problem::kTooLarge : Problem::kNotFinite;
}

// Appends the blocks of a view, those of the same columns one after the other.
void cut_view(const StageItem& item, int64_t index, std::vector<Piece>& pieces) {
  const Region& region = item.region;
  for (int64_t column = 0; column < region.columns; column += kBlockColumns)
    for (int64_t first = 0; first < region.rows;) {
      // A block ends where a run ends, and where a column tile of the weight ends.
      const int64_t aligned = first + kBlockRows - (region.first_row + first) % kColumns;
      const int64_t next = std::min({region.rows, aligned, (first / item.run + 1) * item.run});
      pieces.push_back({index, first, next - first, column, std::min(kBlockColumns, region.columns - column)});
      first = next;
    }
}

StageResult stage_block(bool bf16, const StageItem& item, const Piece& block) {
  const Region& region = item.region;
  const RowKernels& kernels = row_kernels();
  const int64_t n = block.count * block.columns, width = bytes_of(item.kind), size = bf16 ? 2 : 4;
  char* source = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(n * width)));
  const int64_t at_once = block.count == item.stride ? block.columns : 1;  // columns, which are adjacent then
  StageResult result = {};
  for (int64_t c = 0; c < block.columns && result.problem == Problem::kNone; c += at_once)
    result = read(item, item.viewed(block.first, block.first_column + c) * width, at_once * block.count * width,
                  source + c * block.count * width);
  if (result.problem != Problem::kNone) return result;
  char* values = source;
  if (item.kind != (bf16 ? Kind::kBf16 : Kind::kF32)) {
    values = static_cast<char*>(scratch(kScratchInner, static_cast<size_t>(n * size)));
    kernels.convert(item.kind, source, n, bf16, values);
  }
  char* rows = static_cast<char*>(scratch(kScratchQkv, static_cast<size_t>(n * size)));
  kernels.transpose(bf16, values, block.count, block.columns, rows);
  bool finite = true;
  if (region.experts > 0) {  // the stored order is that of the tensor
    for (int64_t c = 0; c < block.columns; ++c)
      finite &= kernels.check(bf16, values + c * block.count * size, item.viewed(block.first, block.first_column + c),
                              block.count, result.fingerprint);
  } else {
    for (int64_t r = 0; r < block.count; ++r)
      finite &=
          kernels.check(bf16, rows + r * block.columns * size, (block.first + r) * region.columns + block.first_column,
                        block.columns, result.fingerprint);
  }
  if (!finite) {
    result.problem = problem_of(bf16, item.kind, source, n);
    return result;
  }
  const auto pack = [&](int64_t first, int64_t count, const char* from) {
    kernels.pack_block(*region.linear, first, count, block.first_column, block.columns, from);
  };
  if (region.interleaved == 0) {
    pack(region.first_row + block.first, block.count, rows);
    return result;
  }
  const int64_t expert = block.first / region.rows_of_expert(), first = block.first % region.rows_of_expert();
  const int64_t half = block.count / 2, row_bytes = block.columns * size;
  char* parted = static_cast<char*>(scratch(kScratchInner, static_cast<size_t>(n * size)));  // over `values`
  for (int64_t r = 0; r < block.count; ++r)
    std::memcpy(parted + (r % 2 * half + r / 2) * row_bytes, rows + r * row_bytes, static_cast<size_t>(row_bytes));
  for (int64_t part = 0; part < 2; ++part)
    pack(region.linear_row(expert, first + part), half, parted + part * half * row_bytes);
  return result;
}

StageResult stage_piece(bool bf16, const StageItem& item, int64_t first, int64_t count) {
  const Region& region = item.region;
  const RowKernels& kernels = row_kernels();
  const int64_t n = count * item.unit(), value = first * item.unit();
  char* source = static_cast<char*>(scratch(kScratchInput, static_cast<size_t>(n * bytes_of(item.kind))));
  StageResult result = read(item, value * bytes_of(item.kind), n * bytes_of(item.kind), source);
  if (result.problem != Problem::kNone) return result;
  char* values = source;
  if (item.kind != (bf16 ? Kind::kBf16 : Kind::kF32)) {
    values = static_cast<char*>(scratch(kScratchInner, static_cast<size_t>(n * (bf16 ? 2 : 4))));
    kernels.convert(item.kind, source, n, bf16, values);
  }
  if (!kernels.check(bf16, values, value, n, result.fingerprint)) {
    result.problem = problem_of(bf16, item.kind, source, n);
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
              const std::function<StageResult(const Piece&)>& body, size_t on_disk) {
  std::atomic<size_t> taken{0};
  std::mutex mutex;
  const std::function<void()> work = [&] {
    for (size_t i; (i = taken.fetch_add(1)) < pieces.size();) {
      const bool stopped = __atomic_load_n(stop, __ATOMIC_RELAXED) != 0;
      const StageResult result = stopped ? StageResult{{}, Problem::kStopped, 0} : body(pieces[i]);
      std::lock_guard<std::mutex> lock(mutex);
      add(results[pieces[i].item], result);
    }
  };
  const int threads = static_cast<int>(std::min(pieces.size(), static_cast<size_t>(num_threads())));
  if (threads == 0) return;
  BackgroundThreads background(work);
  background.start(threads, Priority::kIdle);
  if (!background.wait_for(kPatience * (pieces.size() - on_disk / 2))) background.start(threads, Priority::kNice);
  background.join();
}

void stage(bool bf16, const StageItem* items, int64_t count, const int32_t* stop, StageResult* results) {
  std::vector<int64_t> order(static_cast<size_t>(count));  // files are read from their beginning to their end
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::tie(items[a].fd, items[a].offset) < std::tie(items[b].fd, items[b].offset);
  });
  std::vector<Piece> pieces;
  for (const int64_t i : order)
    items[i].stride != 0 ? cut_view(items[i], i, pieces) : cut(items[i].region, i, bytes_of(items[i].kind), pieces);
  const ReadAhead ahead(items, pieces);
  const auto body = [&](const Piece& piece) {
    ahead.reached(static_cast<size_t>(&piece - pieces.data()));
    const StageItem& item = items[piece.item];
    return item.stride != 0 ? stage_block(bf16, item, piece) : stage_piece(bf16, item, piece.first, piece.count);
  };
  work_off(pieces, stop, results, body, ahead.on_disk());
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
