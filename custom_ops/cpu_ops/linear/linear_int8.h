// Linears with int8 weights. Their kernels are not all those of an instruction set of Isa: the instructions for
// AVX512_VNNI came apart from it.
#pragma once

#include "kernels.h"
#include "runtime/memory.h"

namespace fd {

// The functions of linear.h, for weights with int8 values.
struct LinearKernels {
  LinearInput (*make_input)(ScratchSlot slot, const float* x, const float* norm, float eps, int64_t m, const Weight& w);
  void (*multiply)(const LinearInput& input, const Weight& w, const LoraRows& loras, float* out, bool accumulate);
  LinearInput (*multiply_gated)(ScratchSlot slot, const LinearInput& input, const Weight& w, const LoraRows& loras,
                                Activation activation, const Weight& next);
};

namespace avx2 {
extern const LinearKernels kInt8Linears;
}
namespace avx512_vnni {
extern const LinearKernels kInt8Linears;
}
namespace amx {
extern const LinearKernels kInt8Linears;
}

// The fastest ones that the machine and FASTDEPLOY_CPU_ISA allow. With avx512 and avx512_bf16, those with AVX512_VNNI
// where the CPU has it.
const LinearKernels& int8_linears();

}  // namespace fd
