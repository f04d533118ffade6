// Memory for weights, KV blocks and per-call scratch.
#pragma once

#include <cstddef>

namespace fd {

// The next multiple of `unit`.
template <typename T, typename Unit>
static constexpr T round_up(T n, Unit unit) {
  return (n + static_cast<T>(unit) - 1) / static_cast<T>(unit) * static_cast<T>(unit);
}

// Allocates zeroed pages, aligned to 2 MiB and advised to be huge, except for a short end: with small pages a stream of
// weights misses the TLB every 4 KiB and the hardware prefetcher stops at every page. Null when there is no memory
// left.
void* allocate_pages(size_t bytes);
void free_pages(void* pointer, size_t bytes);

// Per-thread scratch, 64-byte aligned, valid until the same thread asks for the same slot again; contents undefined.
// Throws bad_alloc. The workers of an op may read what the caller's slot holds.
enum ScratchSlot {
  kScratchInput,
  kScratchInner,
  kScratchQkv,
  kScratchLatent,
  kScratchAttended,
  kScratchPartial,
  kScratchGateUp,
  kScratchOutput,
  kScratchQuery,
  kScratchTasks,
  kScratchTask,
  kScratchTiles,
  kScratchLoraRows,
  kScratchLoraRuns,
  kScratchShrunk,
  kScratchLoraInput,
  kScratchNormed,
  kScratchRouter,
  kScratchRouting,
  kScratchExpertRows,
  kScratchExpertInput,
  kScratchExpertInner,
  kScratchExpertOutput,
  kScratchHeadRows,
  kScratchHeadInput,
  kNumScratchSlots
};
void* scratch(ScratchSlot slot, size_t bytes);
void free_scratch();  // frees the slots of the calling thread

}  // namespace fd
