"""The roofline of a model counts the weights that a decode step reads, of a mixture those of the chosen experts."""

from __future__ import annotations

import pytest

from fastdeploy.core.roofline import Machine
from fastdeploy.model_executor.models import build_model, parse_config
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.worker.roofline import step_roofline

MACHINE = Machine(read=1000.0, peak=None)
# Per layer: q and o 32 x 16 each, k and v 16 x 16 each: 1536. Head: 10 x 16.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 64, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 2,
    "attention_bias": False, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
DENSE = 3 * 48 * 16  # of the first layer
ROUTER, EXPERT = 4 * 16, 3 * 16 * 16  # of the second layer


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_experts_that_were_chosen_and_a_token_is_multiplied_with_its_own(tied):
    model = build_model(parse_config(CONFIG | {"tie_word_embeddings": tied}), ReferenceOps("bfloat16"), 64)
    roofline, rest = step_roofline(model, MACHINE, 100), 2 * 1536 + DENSE + ROUTER + 160
    assert roofline.least_s(1, 7) == pytest.approx((2 * (rest + 2 * EXPERT) + 700) / 1000)
    assert roofline.least_s(2, 7) == pytest.approx((2 * (rest + 3 * EXPERT) + 700) / 1000)
    assert roofline.least_s(50, 7) == pytest.approx((2 * (rest + 4 * EXPERT) + 700) / 1000)
    bound = roofline._replace(machine=Machine(1e9, 10.0))
    assert bound.least_s(3, 0) == pytest.approx(3 * 2 * (rest + 2 * EXPERT) / 10)


def test_a_dense_model_reads_all_its_weights_at_any_number_of_sequences():
    config = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    roofline = step_roofline(build_model(parse_config(config), ReferenceOps("bfloat16"), 64), MACHINE, 0)
    assert roofline.least_s(1, 0) == roofline.least_s(8, 0) == pytest.approx(2 * (2 * (1536 + DENSE) + 160) / 1000)
