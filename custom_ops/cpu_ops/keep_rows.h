// Dropping the rows of a step that nothing after a block reads. Compiled once per instruction set.
#pragma once

#include <cstring>

#include "kernels.h"
#include "runtime/memory.h"

namespace fd {
namespace FD_ISA {

// x[i] = x[rows[i]], for `count` ascending rows of `width` numbers.
template <typename T>
void pick_rows(T* x, const int64_t* rows, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i)
    std::memmove(x + i * width, x + rows[i] * width, static_cast<size_t>(width) * sizeof(T));
}

// Drops all rows but step.rows of the residual [m, hidden] and of x [m, width], if these are given.
inline void keep_rows(StepState& step, int64_t hidden, float* x, int64_t width) {
  if (step.rows == nullptr) return;
  step.m = step.num_rows;
  pick_rows(x, step.rows, step.m, width);
  pick_rows(step.residual, step.rows, step.m, hidden);
  if (step.loras.rows == nullptr) return;
  auto* picked = static_cast<int32_t*>(scratch(kScratchLoraRows, static_cast<size_t>(step.m) * 4));
  for (int64_t i = 0; i < step.m; ++i) picked[i] = step.loras.rows[step.rows[i]];
  step.loras.rows = picked;
}

}  // namespace FD_ISA
}  // namespace fd
