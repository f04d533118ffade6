// Detection of the instruction sets of this machine (CPUID, XCR0, and the permission of Linux for AMX tiles).
#include "runtime/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace fd {
namespace {

// AMX tile data is a large, dynamically enabled part of the thread state: the kernel faults (SIGILL) on its first
// use unless the process asked for it. The permission covers all threads and is inherited.
bool request_amx_permission() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

unsigned long long xgetbv0() {
  unsigned lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<unsigned long long>(hi) << 32) | lo;
}

Isa initial_isa() {
  Isa best = detect_isa();
  const char* wanted = std::getenv("FASTDEPLOY_CPU_ISA");
  if (wanted == nullptr) return best;
  Isa cap = best;
  if (std::strcmp(wanted, "avx2") == 0) cap = Isa::kAvx2;
  if (std::strcmp(wanted, "avx512") == 0) cap = Isa::kAvx512;
  if (std::strcmp(wanted, "avx512_bf16") == 0) cap = Isa::kAvx512Bf16;
  return std::min(best, cap);
}

std::atomic<int>& isa_cell() {
  static std::atomic<int> cell{static_cast<int>(initial_isa())};
  return cell;
}

}  // namespace

Isa detect_isa() {
  static const Isa found = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::kNone;
    const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12);
    if (!osxsave || !avx || !fma) return Isa::kNone;
    const unsigned long long xcr0 = xgetbv0();
    if ((xcr0 & 0x6) != 0x6) return Isa::kNone;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::kNone;
    if (!(b & (1u << 5))) return Isa::kNone;                                    // AVX2
    const unsigned needed = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
    if ((b & needed) != needed || (xcr0 & 0xe6) != 0xe6) return Isa::kAvx2;
    const unsigned amx_bits = (1u << 22) | (1u << 24) | (1u << 25);  // BF16, TILE, INT8
    const bool amx = (d & amx_bits) == amx_bits && (xcr0 & 0x60000) == 0x60000;
    unsigned a1 = 0;
    __get_cpuid_count(7, 1, &a1, &b, &c, &d);
    const bool avx512_bf16 = a1 & (1u << 5);
    if (!avx512_bf16) return Isa::kAvx512;
    return amx && request_amx_permission() ? Isa::kAmx : Isa::kAvx512Bf16;
  }();
  return found;
}

bool has_avx512_vnni() {
  static const bool found = [] {
    unsigned a, b, c, d;
    return detect_isa() >= Isa::kAvx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 11));
  }();
  return found;
}

Isa current_isa() { return static_cast<Isa>(isa_cell().load(std::memory_order_relaxed)); }

Isa set_isa(Isa wanted) {
  const Isa isa = std::min(detect_isa(), wanted);
  isa_cell().store(static_cast<int>(isa));
  return isa;
}

}  // namespace fd
