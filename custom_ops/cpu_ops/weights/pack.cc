// Packed weights, and packing on the calling thread: beside steps, and so not on the thread pool.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "runtime/memory.h"
#include "weights/staging.h"

namespace fd {

Weight* new_weight(bool bf16, int64_t n, int64_t k, bool with_bias) {
  auto* w = new (std::nothrow) Weight{bf16, n, k, bf16 ? round_up(k, kDepth) : k, 0, nullptr, nullptr, nullptr};
  if (w == nullptr) return nullptr;
  w->bytes = w->tiles() * w->tile_elements() * (bf16 ? 2 : 4);
  w->data = allocate_pages(static_cast<size_t>(w->bytes));
  if (with_bias) w->bias = static_cast<float*>(std::calloc(static_cast<size_t>(w->tiles() * kColumns), 4));
  if (w->data == nullptr || (with_bias && w->bias == nullptr)) {
    free_weight(w);
    return nullptr;
  }
  return w;
}

void free_weight(Weight* w) {
  if (w == nullptr) return;
  free_pages(w->data, static_cast<size_t>(w->bytes));
  free_pages(w->int8, static_cast<size_t>(w->int8_bytes()));
  std::free(w->bias);
  delete w;
}

void pack_rows(Weight& w, const void* source, bool source_bf16, int64_t first, int64_t n) {
  const RowKernels& kernels = row_kernels();
  if (source_bf16 == w.bf16) return kernels.pack(w, first, n, source);
  const Kind kind = source_bf16 ? Kind::kBf16 : Kind::kF32;
  const std::unique_ptr<char[]> values(new char[static_cast<size_t>(kColumns * w.k * (w.bf16 ? 2 : 4))]);
  for (int64_t i = 0; i < n;) {
    const int64_t rows = std::min(n - i, kColumns - (first + i) % kColumns);
    kernels.convert(kind, static_cast<const char*>(source) + i * w.k * bytes_of(kind), rows * w.k, w.bf16,
                    values.get());
    kernels.pack(w, first + i, rows, values.get());
    i += rows;
  }
}

void unpack_rows(const Weight& w, void* target, int64_t first, int64_t n) { row_kernels().unpack(w, first, n, target); }

}  // namespace fd
