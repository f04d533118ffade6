// The speed of a plain reader of memory, for benchmarks and for the roofline in /metrics.
#include "kernels.h"
#include "runtime/thread_pool.h"

namespace fd {
namespace FD_ISA {

// Reads in blocks of 64 KiB, four places of a block at the same time. The core's own prefetcher follows each of them,
// and fewer do not keep memory busy: two cores of Zen 3 read 12, 22 and 33 GB/s with 1, 2 and 4 places each.
void probe_read(const void* data, int64_t bytes) {
  using Line = int64_t __attribute__((vector_size(64)));
  constexpr int64_t kBlock = 1 << 16, kStreams = 4, kPart = kBlock / kStreams;
  const char* base = static_cast<const char*>(data);
  parallel_for(bytes / kBlock, 16, [&](int64_t begin, int64_t end) {
    Line sum = {};
    for (const char* block = base + begin * kBlock; block < base + end * kBlock; block += kBlock)
      for (int64_t at = 0; at < kPart; at += sizeof(Line))
        for (int64_t stream = 0; stream < kStreams; ++stream)
          sum ^= *reinterpret_cast<const Line*>(block + stream * kPart + at);
    __asm__ volatile("" : : "m"(sum));  // or the compiler would leave the loop out
  });
}

}  // namespace FD_ISA
}  // namespace fd
