// The choice of the kernels of int8 linears.
#include "linear/linear_int8.h"
#include "runtime/cpu_features.h"

namespace fd {

const LinearKernels& int8_linears() {
  const Isa isa = current_isa();
  if (isa == Isa::kAmx) return amx::kInt8Linears;
  return isa >= Isa::kAvx512 && has_avx512_vnni() ? avx512_vnni::kInt8Linears : avx2::kInt8Linears;
}

}  // namespace fd
