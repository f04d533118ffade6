"""Tiny random checkpoints in Hugging Face's layout, of every architecture that the server has. Numpy only.

The same :class:`Spec` gives the same bytes on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.testing.tensors import WEIGHTS, to_bfloat16, write_safetensors

BFLOAT16 = "bfloat16"
# "model_type" in config.json of the architectures of which it is not the name in lower case.
MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}


@dataclass(frozen=True)
class Spec:
    """A checkpoint to make.

    hidden, inner: sizes of the residual and of a dense MLP. head_dim: of a head (default: hidden / heads). dtype:
    "float32" or "bfloat16". tied: the head is the embedding. shards: number of files; above 1 they have an index. eos:
    token ids that end a text. extra: further keys of config.json; experts, biases and latent attention follow from it.
    """

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
    eos: tuple[int, ...] = (2, 3)
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
        """The layers that have experts."""
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
        """The size of a head."""
        return self.head_dim or self.hidden // self.heads


def config_json(spec: Spec) -> dict[str, Any]:
    """Return config.json of the spec, as transformers reads it."""
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
        "eos_token_id": spec.eos[0],
        "use_sliding_window": False,
    }
    if spec.head_dim is not None:
        config["head_dim"] = spec.head_dim
    return config | spec.extra


def random_tensors(spec: Spec) -> dict[str, np.ndarray]:
    """Return float32 tensors by name, from the spec's seed: norms multiply with values around 1, biases are around 0,
    but they are not 1 and 0. Scales are such that greedy choices are seldom near a tie, and do not repeat one token for
    ever (as tied weights like to)."""
    draw = _Draw(spec)
    # Gemma multiplies the embedding with sqrt(hidden); its last norm makes up for the small values of a tied embedding.
    scale, last_mean = (0.04, 6.0) if spec.is_gemma else (0.2, 1.0)
    tensors = {"model.embed_tokens.weight": draw.normal(spec.vocab, spec.hidden, scale=scale)}
    for layer in range(spec.layers):
        tensors |= {f"model.layers.{layer}.{name}": array for name, array in draw.layer(layer)}
    tensors["model.norm.weight"] = draw.norm(spec.hidden, last_mean)
    if not spec.tied:
        tensors["lm_head.weight"] = draw.normal(spec.vocab, spec.hidden, scale=0.4)
    return tensors


Named = Iterator[tuple[str, np.ndarray]]


class _Draw:
    """Draws the tensors of a spec one after the other. A change of the order changes the values of all that follow."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)

    def normal(self, *shape: int, scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * self.rng.standard_normal(shape)).astype(np.float32)

    def norm(self, size: int, mean: float = 1.0) -> np.ndarray:
        return self.normal(size, scale=0.3, mean=mean - self.spec.is_gemma)  # Gemma multiplies with 1 + weight

    def layer(self, layer: int) -> Named:
        """Yield the tensors of a layer, with their names inside it."""
        spec = self.spec
        yield "input_layernorm.weight", self.norm(spec.hidden)
        *first, output = spec.attention
        for name in first:
            yield from self.attention_linear(name, 1.0)
        for name, size in spec.attention_norms.items():
            yield f"self_attn.{name}.weight", self.norm(size)
        yield from self.attention_linear(output, 2.0)
        yield "post_attention_layernorm.weight", self.norm(spec.hidden)
        for name in ("pre", "post") if spec.is_gemma else ():
            yield f"{name}_feedforward_layernorm.weight", self.norm(spec.hidden)
        yield from self.gpt_oss_experts() if spec.is_gpt_oss else self.mlps(layer)

    def attention_linear(self, name: str, gain: float) -> Named:
        rows, columns = self.spec.attention[name]
        yield f"self_attn.{name}.weight", self.normal(rows, columns, scale=gain * columns**-0.5)
        if name in self.spec.biases:
            yield f"self_attn.{name}.bias", self.normal(rows, scale=0.3)

    def gpt_oss_experts(self) -> Named:
        experts, inner, hidden = self.spec.experts, self.spec.inner, self.spec.hidden
        yield "self_attn.sinks", self.normal(self.spec.heads, scale=1.0, mean=1.0)
        yield "mlp.router.weight", self.normal(experts, hidden, scale=2 * hidden**-0.5)
        yield "mlp.router.bias", self.normal(experts, scale=0.5)
        # Some of the values are beyond the limit of the activation.
        yield "mlp.experts.gate_up_proj", self.normal(experts, hidden, 2 * inner, scale=4 * hidden**-0.5)
        yield "mlp.experts.gate_up_proj_bias", self.normal(experts, 2 * inner, scale=0.3)
        yield "mlp.experts.down_proj", self.normal(experts, inner, hidden, scale=0.3 * inner**-0.5)
        yield "mlp.experts.down_proj_bias", self.normal(experts, hidden, scale=0.3)

    def mlps(self, layer: int) -> Named:
        spec, hidden = self.spec, self.spec.hidden
        if layer in spec.experts_layers:
            yield "mlp.gate.weight", self.normal(spec.experts, hidden, scale=2 * hidden**-0.5)
            name, shape = spec.router_bias
            if name:
                yield f"mlp.{name}", self.normal(*shape, scale=0.2)
        for mlp, inner in spec.mlps(layer).items():
            for name in ("gate", "up"):
                yield f"{mlp}.{name}_proj.weight", self.normal(inner, hidden, scale=hidden**-0.5)
            yield f"{mlp}.down_proj.weight", self.normal(hidden, inner, scale=3 * inner**-0.5)
        if spec.extra.get("mlp_bias") or spec.extra.get("use_bias"):
            for name, size in (("gate", spec.inner), ("up", spec.inner), ("down", hidden)):
                yield f"mlp.{name}_proj.bias", self.normal(size, scale=0.3)


def is_bfloat16(spec: Spec, name: str) -> bool:
    """Return whether a checkpoint has this tensor as bfloat16. Published ones have the router in float32."""
    return spec.dtype == BFLOAT16 and not name.endswith(("mlp.gate.weight", "e_score_correction_bias"))


def write_checkpoint(folder: Path, spec: Spec, tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write a folder of config.json, generation_config.json and weights, and return it. It has no tokenizer. tensors:
    float32 by name, in place of the random ones; stored in the spec's dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(spec), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": spec.eos}))
    tensors = random_tensors(spec) if tensors is None else tensors
    stored = {name: to_bfloat16(a) if is_bfloat16(spec, name) else a for name, a in tensors.items()}
    if spec.shards == 1:
        write_safetensors(folder / WEIGHTS, stored)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05}-of-{spec.shards:05}.safetensors"
        names = list(stored)[shard :: spec.shards]  # interleaved, so that fused parts lie in different files
        write_safetensors(folder / file, {name: stored[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
