"""Tiny random Hugging Face checkpoints. Needs numpy only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Spec:
    """A checkpoint to make. ``shards`` above 1 writes an index. ``extra``: further keys of config.json."""

    name: str
    architecture: str = "Qwen3ForCausalLM"
    dtype: str = "float32"
    tied: bool = False
    head_dim: int | None = None
    shards: int = 1
    hidden: int = 64
    inner: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 211
    max_len: int = 512
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return MODEL_TYPES.get(self.architecture, self.architecture.removesuffix("ForCausalLM").lower())

    @property
    def is_gemma(self) -> bool:
        return self.model_type == "gemma3_text"

    @property
    def is_deepseek(self) -> bool:
        return "kv_lora_rank" in self.extra

    @property
    def biases(self) -> tuple[str, ...]:
        """Attention projections that have a bias."""
        everywhere = self.extra.get("attention_bias") or self.extra.get("use_bias")
        if self.is_deepseek:
            return ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if everywhere else ()
        letters = "qkv" if self.model_type in ("qwen2", "glm4_moe") else "qkvo" if everywhere else ""
        return tuple(f"{letter}_proj" for letter in letters)

    @property
    def experts(self) -> int:
        """The number of experts of a layer, 0 for a dense model."""
        keys = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
        return next((self.extra[key] for key in keys if key in self.extra), 0)

    @property
    def is_gpt_oss(self) -> bool:
        return self.model_type == "gpt_oss"

    @property
    def experts_layers(self) -> list[int]:
        first = self.extra.get("moe_layer_start_index", self.extra.get("first_k_dense_replace", 0))
        dense = self.extra.get("mlp_only_layers", [])
        return [layer for layer in range(first, self.layers) if self.experts and layer not in dense]

    @property
    def router_bias(self) -> tuple[str, tuple[int, ...]]:
        """The name and shape of the router's bias for the choice, "" without."""
        if self.model_type == "ernie4_5_moe":
            return "moe_statics.e_score_correction_bias", (1, self.experts)
        named = self.model_type in ("glm4_moe", "deepseek_v3")
        return ("gate.e_score_correction_bias", (self.experts,)) if named else ("", ())

    def mlps(self, layer: int) -> dict[str, int]:
        """The MLPs of a layer, each with its inner size."""
        if layer not in self.experts_layers:
            return {"mlp": self.inner}
        inner = self.extra["moe_intermediate_size"]
        shared = inner * self.extra.get("moe_num_shared_experts", self.extra.get("n_shared_experts", 0))
        return {f"mlp.experts.{i}": inner for i in range(self.experts)} | (
            {"mlp.shared_experts": shared} if shared else {}
        )

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """The linears of the attention of a layer, each with its output and input size."""
        of, heads, hidden = self.extra, self.heads, self.hidden
        if not self.is_deepseek:
            q, kv = heads * self.dim, self.kv_heads * self.dim
            return {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        latent, plain, rotary, value = (
            of[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q, inner = heads * (plain + rotary), of["q_lora_rank"]
        queries = {"q_proj": (q, hidden)} if inner is None else {"q_a_proj": (inner, hidden), "q_b_proj": (q, inner)}
        return queries | {
            "kv_a_proj_with_mqa": (latent + rotary, hidden),
            "kv_b_proj": (heads * (plain + value), latent),
            "o_proj": (hidden, heads * value),
        }

    @property
    def attention_norms(self) -> dict[str, int]:
        """The norms inside the attention of a layer, each with its size."""
        if self.is_deepseek:
            inner = {} if self.extra["q_lora_rank"] is None else {"q_a_layernorm": self.extra["q_lora_rank"]}
            return inner | {"kv_a_layernorm": self.extra["kv_lora_rank"]}
        there = self.model_type in ("qwen3", "qwen3_moe") or self.is_gemma or self.extra.get("use_qk_norm")
        return {"q_norm": self.dim, "k_norm": self.dim} if there else {}

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads


MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}
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


def config_json(spec: Spec) -> dict[str, Any]:
    """config.json of the spec, as transformers would read it."""
    config = {
        "architectures": [spec.architecture],
        "model_type": spec.model_type,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.inner,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": spec.dtype,
        "eos_token_id": 2,
        "use_sliding_window": False,
    }
    if spec.head_dim is not None:
        config["head_dim"] = spec.head_dim
    return config | spec.extra


def random_tensors(spec: Spec) -> dict[str, np.ndarray]:
    """float32 tensors by name, from the spec's seed: norms multiply with values around 1, biases are around 0, but they
    are not 1 and 0. Scales are such that greedy choices are seldom near a tie, and do not repeat one token for ever (as
    tied weights like to)."""
    rng = np.random.default_rng(spec.seed)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(size: int, mean: float = 1.0) -> np.ndarray:  # Gemma multiplies with 1 + weight
        return normal(size, scale=0.3, mean=mean - spec.is_gemma)

    hidden = spec.hidden
    # Gemma multiplies the embedding with sqrt(hidden); its last norm makes up for the small values of a tied embedding.
    tensors = {"model.embed_tokens.weight": normal(spec.vocab, hidden, scale=0.04 if spec.is_gemma else 0.2)}
    for layer in range(spec.layers):
        p = f"model.layers.{layer}."
        tensors[p + "input_layernorm.weight"] = norm(hidden)
        *inner, last = spec.attention.items()
        for name, (rows, columns) in inner:
            tensors[f"{p}self_attn.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            if name in spec.biases:
                tensors[f"{p}self_attn.{name}.bias"] = normal(rows, scale=0.3)
        for name, size in spec.attention_norms.items():
            tensors[f"{p}self_attn.{name}.weight"] = norm(size)
        name, (rows, columns) = last
        tensors[f"{p}self_attn.{name}.weight"] = normal(rows, columns, scale=2 * columns**-0.5)
        if name in spec.biases:
            tensors[f"{p}self_attn.{name}.bias"] = normal(rows, scale=0.3)
        tensors[p + "post_attention_layernorm.weight"] = norm(hidden)
        for name in ("pre", "post") if spec.is_gemma else ():
            tensors[p + f"{name}_feedforward_layernorm.weight"] = norm(hidden)
        if spec.is_gpt_oss:
            experts, inner, mlp = spec.experts, spec.inner, p + "mlp."
            tensors[p + "self_attn.sinks"] = normal(spec.heads, scale=1.0, mean=1.0)
            tensors[mlp + "router.weight"] = normal(experts, hidden, scale=2 * hidden**-0.5)
            tensors[mlp + "router.bias"] = normal(experts, scale=0.5)
            # Some of the values are beyond the limit of the activation.
            tensors[mlp + "experts.gate_up_proj"] = normal(experts, hidden, 2 * inner, scale=4 * hidden**-0.5)
            tensors[mlp + "experts.gate_up_proj_bias"] = normal(experts, 2 * inner, scale=0.3)
            tensors[mlp + "experts.down_proj"] = normal(experts, inner, hidden, scale=0.3 * inner**-0.5)
            tensors[mlp + "experts.down_proj_bias"] = normal(experts, hidden, scale=0.3)
            continue
        if layer in spec.experts_layers:
            tensors[p + "mlp.gate.weight"] = normal(spec.experts, hidden, scale=2 * hidden**-0.5)
            name, shape = spec.router_bias
            if name:
                tensors[f"{p}mlp.{name}"] = normal(*shape, scale=0.2)
        for mlp, inner in spec.mlps(layer).items():
            for name in ("gate", "up"):
                tensors[f"{p}{mlp}.{name}_proj.weight"] = normal(inner, hidden, scale=hidden**-0.5)
            tensors[f"{p}{mlp}.down_proj.weight"] = normal(hidden, inner, scale=3 * inner**-0.5)
        if spec.extra.get("mlp_bias") or spec.extra.get("use_bias"):
            for name, size in (("gate", spec.inner), ("up", spec.inner), ("down", hidden)):
                tensors[p + f"mlp.{name}_proj.bias"] = normal(size, scale=0.3)
    tensors["model.norm.weight"] = norm(hidden, mean=6.0 if spec.is_gemma else 1.0)
    if not spec.tied:
        tensors["lm_head.weight"] = normal(spec.vocab, hidden, scale=0.4)
    return tensors


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, round to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def is_bfloat16(spec: Spec, name: str) -> bool:
    """Whether a checkpoint has this tensor as bfloat16. Published ones have the router in float32."""
    return spec.dtype == BFLOAT16 and not name.endswith(("mlp.gate.weight", "e_score_correction_bias"))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], **names: str) -> None:
    """float32, float16, int8, uint8, or bfloat16 given as uint16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8", "uint8": "U8"} | names
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def write_checkpoint(folder: Path, spec: Spec, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A Hugging Face folder. ``tensors``: float32 by name, in place of random ones; stored in the spec's dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(spec), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    tensors = random_tensors(spec) if tensors is None else tensors
    stored = {name: bfloat16_bits(a) if is_bfloat16(spec, name) else a for name, a in tensors.items()}
    if spec.shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return folder
    weight_map = {}
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05}-of-{spec.shards:05}.safetensors"
        names = list(stored)[shard :: spec.shards]  # interleaved, so that fused parts lie in different files
        write_safetensors(folder / file, {name: stored[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def prompt(length: int, vocab: int) -> list[int]:
    return np.random.default_rng(length).integers(4, vocab, length).tolist()
