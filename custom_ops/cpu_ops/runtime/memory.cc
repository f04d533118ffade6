// Pages for weights and KV blocks, and the scratch buffers of each thread.
#include "runtime/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace fd {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

// Rounds up to whole huge pages unless less than half of the last is needed: the waste of four weights a layer adds up.
size_t whole_pages(size_t bytes) { return bytes % kHuge < kHuge / 2 ? round_up(bytes, 4096) : round_up(bytes, kHuge); }

class Buffer {
 public:
  ~Buffer() { release(); }

  // Throws bad_alloc; the buffer is empty then.
  void* at_least(size_t bytes) {
    if (bytes_ < bytes) grow(bytes);
    return pointer_;
  }

  void release() {
    std::free(std::exchange(pointer_, nullptr));
    bytes_ = 0;
  }

 private:
  void grow(size_t bytes) {
    release();  // before the new one is allocated: the old contents are not needed
    size_t size = round_up(bytes + bytes / 4, 4096);
    const bool large = size > kHuge / 4;
    if (large) size = round_up(size, kHuge);
    void* pointer = std::aligned_alloc(large ? kHuge : 4096, size);
    if (pointer == nullptr) throw std::bad_alloc();
    if (large) madvise(pointer, size, MADV_HUGEPAGE);
    pointer_ = pointer;
    bytes_ = size;
  }

  void* pointer_ = nullptr;
  size_t bytes_ = 0;
};

thread_local Buffer buffers[kNumScratchSlots];

}  // namespace

void* allocate_pages(size_t bytes) {
  const size_t size = whole_pages(bytes);
  void* raw = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHuge - 1) / kHuge * kHuge;
  if (aligned > start) munmap(raw, aligned - start);
  if (start + kHuge > aligned) munmap(reinterpret_cast<void*>(aligned + size), start + kHuge - aligned);
  madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(aligned);
}

void free_pages(void* pointer, size_t bytes) {
  if (pointer != nullptr) munmap(pointer, whole_pages(bytes));
}

void* scratch(ScratchSlot slot, size_t bytes) { return buffers[slot].at_least(bytes); }

void free_scratch() {
  for (Buffer& buffer : buffers) buffer.release();
}

}  // namespace fd
