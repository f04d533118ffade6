// A number of rows as a constant, so that a kernel keeps a register for each. The function is static: runtime/simd.h
// gives the reason.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fd {
namespace FD_ISA {

// Calls body(rows) with the number of rows, 1 to Most, as a constant.
template <int Most, typename Body>
static inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, body);
  }
  body(std::integral_constant<int, Most>());
}

}  // namespace FD_ISA
}  // namespace fd
