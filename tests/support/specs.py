"""The tiny checkpoints of the tests: some of each architecture, with the odd settings that published ones have."""

from __future__ import annotations

import numpy as np

from fastdeploy.testing.checkpoints import BFLOAT16, Spec

ROPE = {"rope_type": "default", "rope_theta": 5e5}
# Of the 8 frequencies of a head of 16, some are left alone, some interpolated and some divided.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Windows are shorter than most prompts and contexts of the tests, and no multiple of a block of keys.
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 23,
    "sliding_window_pattern": 2,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 1000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
GEMMA_NEW = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 70,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "attention_bias": True,
}
QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
ERNIE_MOE = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "rope_theta": 5e5,
}
GLM_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_theta": 1e6,
}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 16,
    "original_max_position_embeddings": 64,
}
DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rope_scaling": DEEPSEEK_ROPE,
    "rope_interleave": False,  # that of V2 is interleaved
    "attention_bias": True,
}
DEEPSEEK_V2 = DEEPSEEK | {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "rope_scaling": None,
    "attention_bias": False,
}
# Of the 8 frequencies of a head of 16, some are left alone, some interpolated and some divided.
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "sliding_window": 37,
    "rope_theta": 1000.0,
    "rope_scaling": YARN_ROPE,
}
# All experts are chosen: bfloat16 and float32 never choose others, after which nothing could be compared.
GPT_OSS_OTHER = GPT_OSS | {
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "attention_bias": False,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_scaling": YARN_ROPE | {"truncate": True, "attention_factor": 1.1},
}
SPECS = {
    spec.name: spec
    for spec in (
        Spec("qwen2", "Qwen2ForCausalLM", extra={"rope_theta": 1000000.0}, seed=1),
        Spec("qwen2_tied", "Qwen2ForCausalLM", tied=True, kv_heads=1, seed=2),
        Spec("qwen3", head_dim=16, shards=3, extra={"rope_parameters": ROPE}, seed=3),
        Spec(
            "qwen3_wide", head_dim=32, tied=True, heads=6, kv_heads=2, layers=3, extra={"attention_bias": True}, seed=4
        ),
        Spec("llama", "LlamaForCausalLM", extra={"rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE}, shards=2, seed=7),
        Spec(
            "llama_tied",
            "LlamaForCausalLM",
            tied=True,
            head_dim=24,
            kv_heads=4,
            extra={"attention_bias": True, "mlp_bias": True},
            seed=8,
        ),
        Spec("ernie", "Ernie4_5ForCausalLM", tied=True, head_dim=32, kv_heads=1, extra={"rope_theta": 5e5}, seed=9),
        Spec("ernie_bias", "Ernie4_5ForCausalLM", head_dim=24, extra={"use_bias": True}, shards=2, seed=11),
        Spec("mistral", "MistralForCausalLM", head_dim=24, extra={"sliding_window": 33}, seed=9),
        Spec("gemma", "Gemma3ForCausalLM", tied=True, head_dim=24, kv_heads=1, extra=GEMMA, seed=14),
        Spec("gemma_biased", "Gemma3ForCausalLM", tied=True, head_dim=32, layers=3, shards=2, extra=GEMMA_NEW, seed=11),
        Spec("qwen3_moe", "Qwen3MoeForCausalLM", layers=3, head_dim=16, shards=3, extra=QWEN_MOE, seed=15),
        Spec("ernie_moe", "Ernie4_5_MoeForCausalLM", layers=3, shards=2, extra=ERNIE_MOE, seed=16),
        Spec("glm_moe", "Glm4MoeForCausalLM", layers=3, head_dim=24, shards=2, extra=GLM_MOE, seed=18),
        Spec("deepseek", "DeepseekV3ForCausalLM", layers=3, kv_heads=4, shards=2, extra=DEEPSEEK, seed=18),
        Spec("deepseek_v2", "DeepseekV2ForCausalLM", tied=True, kv_heads=4, extra=DEEPSEEK_V2, seed=20),
        Spec("gpt_oss", "GptOssForCausalLM", hidden=80, inner=48, layers=3, head_dim=16, extra=GPT_OSS, seed=16),
        Spec("qwen3_bf16", dtype=BFLOAT16, head_dim=32, shards=2, seed=5),
        Spec("qwen2_bf16", "Qwen2ForCausalLM", dtype=BFLOAT16, tied=True, seed=6),
        Spec("gemma_bf16", "Gemma3ForCausalLM", dtype=BFLOAT16, tied=True, head_dim=32, extra=GEMMA, seed=12),
        Spec(
            "gpt_oss_bf16",
            "GptOssForCausalLM",
            dtype=BFLOAT16,
            hidden=80,
            inner=48,
            head_dim=16,
            shards=2,
            extra=GPT_OSS_OTHER,
            seed=20,
        ),
    )
}


def prompt(length: int, vocab: int) -> list[int]:
    """Return ``length`` random token ids, none of them special, that depend on the length only."""
    return np.random.default_rng(length).integers(4, vocab, length).tolist()
