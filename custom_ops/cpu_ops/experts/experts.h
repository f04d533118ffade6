// A mixture of experts: the structures of a block, with the fields of the classes of these names in ops/blocks.py,
// in the same order.
#pragma once

#include "kernels.h"

namespace fd {

// The fields of RouterScore.
enum RouterScore : int64_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };

struct RouterSpec {
  int64_t place, top_k;
  RouterScore score;
  int64_t groups, top_groups, normalize;
  float scale;
  const float* bias;  // [experts], or null
  float norm_min;
};

struct ExpertsBlock {
  const float* norm;
  float norm_eps;
  const Weight* router;
  RouterSpec routing;
  const Weight *gate_up, *down;
  Activation activation;
  const Weight *shared_gate_up, *shared_down;  // or null
};

namespace FD_ISA {

// residual += the weighted sum of the chosen experts, + the shared one. Chooses for all rows, and then keeps only
// step.rows of the residual, if these are given.
void experts_block(const ExpertsBlock& block, StepState& step);

}  // namespace FD_ISA
}  // namespace fd
