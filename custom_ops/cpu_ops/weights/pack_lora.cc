// Packing adapters. Runs on a thread that loads an adapter, beside steps, and so does not use the thread pool.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "runtime/memory.h"
#include "weights/staging.h"

namespace fd {

struct LoraMemory {
  std::atomic<int64_t> users;
  size_t bytes;
  char* data;
};

namespace {

LoraMemory* new_memory(int64_t users, size_t bytes) {
  auto* memory = new (std::nothrow) LoraMemory{{users}, bytes, static_cast<char*>(allocate_pages(bytes))};
  if (memory != nullptr && memory->data == nullptr) {
    delete memory;
    return nullptr;
  }
  return memory;
}

void leave(LoraMemory* memory) {
  if (memory == nullptr || memory->users.fetch_sub(1) > 1) return;
  free_pages(memory->data, memory->bytes);
  delete memory;
}

// The ranks of a column tile: of all projections with columns in it. Without its `b`.
LoraTile tile_ranks(int64_t tile, int64_t parts, const int64_t* rows, const int64_t* ranks) {
  int64_t first = INT64_MAX, last = 0, row = 0, rank = 0;
  for (int64_t p = 0; p < parts; row += rows[p], rank += ranks[p], ++p) {
    if (ranks[p] == 0 || row >= (tile + 1) * kColumns || row + rows[p] <= tile * kColumns) continue;
    first = std::min(first, rank);
    last = rank + ranks[p];
  }
  if (last == 0) return {0, 0, 0};
  first = first / 2 * 2;
  return {static_cast<int32_t>(first), static_cast<int32_t>(round_up(last, 2) - first), 0};
}

// Packs row `column` of b, ranks [first_rank, first_rank + rank). T: the bits of a value in the type of the adapter.
template <typename T>
void pack_b_row(Lora& lora, const T* row, int64_t column, int64_t first_rank, int64_t rank) {
  const LoraTile tile = lora.tiles()[column / kColumns];
  const int64_t lane = column % kColumns, first = first_rank - tile.first;
  T* b = static_cast<T*>(lora.b()) + tile.b;
  for (int64_t i = 0, j = first; i < rank; ++i, ++j)
    b[sizeof(T) == 2 ? (j / 2 * kColumns + lane) * 2 + j % 2 : j * kColumns + lane] = row[i];
}

}  // namespace

Lora* new_lora(bool bf16, int64_t k, int64_t parts, const int64_t* rows, const int64_t* ranks, const float* scaling) {
  int64_t n = 0, rank = 0, b_elements = 0;
  for (int64_t p = 0; p < parts; ++p) {
    n += rows[p];
    rank += ranks[p];
  }
  const int64_t count = (n + kColumns - 1) / kColumns;
  for (int64_t t = 0; t < count; ++t) b_elements += tile_ranks(t, parts, rows, ranks).count * kColumns;
  const int64_t element = bf16 ? 2 : 4;
  auto* lora = new (std::nothrow) Lora{};
  if (lora == nullptr) return nullptr;
  lora->n = n;
  lora->a = {bf16, rank, k, bf16 ? round_up(k, kDepth) : k, 0, nullptr, nullptr, nullptr};
  lora->a.bytes = lora->a.tiles() * lora->a.tile_elements() * element;
  lora->b_at = round_up(lora->a.bytes, 64);
  lora->scaling_at = lora->b_at + round_up(b_elements * element, 64);
  lora->tiles_at = lora->scaling_at + lora->a.tiles() * kColumns * 4;
  lora->bytes = lora->tiles_at + round_up(count * static_cast<int64_t>(sizeof(LoraTile)), 64);
  lora->memory = new_memory(1, static_cast<size_t>(lora->bytes));
  if (lora->memory == nullptr) {
    delete lora;
    return nullptr;
  }
  lora->a.data = lora->memory->data;
  int64_t at = 0;
  for (int64_t t = 0; t < count; ++t) {
    LoraTile& tile = lora->tiles()[t] = tile_ranks(t, parts, rows, ranks);
    tile.b = at;
    at += tile.count * kColumns;
  }
  float* next = lora->scaling();
  for (int64_t p = 0; p < parts; ++p) next = std::fill_n(next, ranks[p], scaling[p]);
  return lora;
}

void free_lora(Lora* lora) {
  if (lora == nullptr) return;
  leave(lora->memory);
  delete lora;
}

void pack_lora(Lora& lora, const void* a, const void* b, bool source_bf16, int64_t first_row, int64_t n,
               int64_t first_rank, int64_t rank) {
  pack_rows(lora.a, a, source_bf16, first_rank, rank);
  const Kind kind = source_bf16 ? Kind::kBf16 : Kind::kF32;
  const std::unique_ptr<char[]> row(new char[static_cast<size_t>(rank * 4)]);
  for (int64_t i = first_row; i < first_row + n; ++i, b = static_cast<const char*>(b) + rank * bytes_of(kind)) {
    row_kernels().convert(kind, b, rank, lora.a.bf16, row.get());
    lora.a.bf16 ? pack_b_row(lora, reinterpret_cast<const uint16_t*>(row.get()), i, first_rank, rank)
                : pack_b_row(lora, reinterpret_cast<const uint32_t*>(row.get()), i, first_rank, rank);
  }
}

bool gather_loras(Lora* const* loras, int64_t count) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += loras[i]->bytes;
  LoraMemory* memory = new_memory(count, static_cast<size_t>(bytes));
  if (memory == nullptr) return false;
  char* to = memory->data;
  for (int64_t i = 0; i < count; ++i, to += loras[i - 1]->bytes) {
    Lora& lora = *loras[i];
    std::memcpy(to, lora.base(), static_cast<size_t>(lora.bytes));
    lora.a.data = to;
    leave(lora.memory);
    lora.memory = memory;
  }
  return true;
}

}  // namespace fd
