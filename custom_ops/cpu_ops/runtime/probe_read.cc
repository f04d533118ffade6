// The speed of a plain reader of memory, for benchmarks and for the roofline in /metrics.
#include <immintrin.h>

#include "kernels.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

void probe_read(const void* data, int64_t bytes) {
  using Line = int64_t __attribute__((vector_size(64)));
  constexpr int64_t kAhead = 8192;
  const char* base = static_cast<const char*>(data);
  parallel_for(bytes >> 16, 16, [&](int64_t begin, int64_t end) {
    Line sum = {};
    for (const char* p = base + (begin << 16); p < base + (end << 16); p += 128) {
      _mm_prefetch(p + kAhead, _MM_HINT_T1);
      _mm_prefetch(p + kAhead + 64, _MM_HINT_T1);
      sum ^= reinterpret_cast<const Line*>(p)[0] ^ reinterpret_cast<const Line*>(p)[1];
    }
    __asm__ volatile("" : : "m"(sum));  // or the compiler would leave the loop out
  });
}

}  // namespace FD_ISA
}  // namespace fd
