// The instruction set of the kernels, decided once per process.
#pragma once

namespace fd {

// Ordered: each level includes the ones below. kNone: not even AVX2 + FMA, the library cannot be used.
enum class Isa : int { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best level that both the CPU and the operating system allow. Asks Linux for the AMX tile state.
Isa detect_isa();

// Whether CPU and system allow AVX512_VNNI, which is no level: older CPUs with AVX-512 have it, and some do not.
bool has_avx512_vnni();

// The level in use: detect_isa(), limited by FASTDEPLOY_CPU_ISA=avx2|avx512|avx512_bf16|amx or by set_isa.
Isa current_isa();

// Limits the level (tests). Returns the level in use. All memory layouts are the same at every level.
Isa set_isa(Isa wanted);

}  // namespace fd
