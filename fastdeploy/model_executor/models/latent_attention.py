"""The builder of latent attention, and what configs say about it. Tensor names are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.model_config import MAX_HEAD_DIM, ModelConfig, count
from fastdeploy.model_executor.models.decoder import Rope
from fastdeploy.model_executor.models.interface import norm_weight
from fastdeploy.model_executor.ops.blocks import AttentionSpec, Block, LatentAttentionBlock
from fastdeploy.model_executor.parameters import Parameter, Use, Value, as_linear, linear, vector

MULTIPLE = 16  # of the sizes of a head: a packed weight has whole tiles of columns for each head
NORM_EPS = 1e-6  # of the two norms inside; transformers does not take that of the config


class Latent(NamedTuple):
    """The sizes of latent attention, with the names of config.json. q_lora_rank: None if queries are projected at
    once."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def key_dim(self) -> int:
        """The size of the one key of all heads, which is all that the KV cache has of a token."""
        return self.qk_rope_head_dim + self.kv_lora_rank


def read_latent(raw: dict[str, Any]) -> Latent:
    """Read the sizes from config.json. Raises InvalidField."""
    found = Latent(
        q_lora_rank=None if raw["q_lora_rank"] is None else count(raw, "q_lora_rank"),
        kv_lora_rank=count(raw, "kv_lora_rank"),
        qk_nope_head_dim=count(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=count(raw, "qk_rope_head_dim"),
        v_head_dim=count(raw, "v_head_dim"),
    )
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(found, key) % MULTIPLE:
            raise InvalidField(key, f"expected a multiple of {MULTIPLE}, got {getattr(found, key)}")
    if found.key_dim > MAX_HEAD_DIM:
        text = f"expected at most {MAX_HEAD_DIM - found.qk_rope_head_dim} beside a qk_rope_head_dim of "
        raise InvalidField("kv_lora_rank", f"{text}{found.qk_rope_head_dim}, got {found.kv_lora_rank}")
    return found


@dataclass(frozen=True)
class LatentAttention:
    """The builder of blocks of latent attention. scale: of the scores. bias: q_a_proj, kv_a_proj_with_mqa and o_proj
    have biases. interleaved: see ``AttentionSpec``."""

    config: ModelConfig
    latent: Latent
    rope: Rope
    scale: float
    bias: bool
    interleaved: bool

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        c, of, key, prefix = self.config, self.latent, f"layers.{layer}.", f"model.layers.{layer}."
        heads, attention = c.num_attention_heads, prefix + "self_attn."
        q_size = heads * (of.qk_nope_head_dim + of.qk_rope_head_dim)
        kv_size = heads * (of.qk_nope_head_dim + of.v_head_dim)
        found = [
            vector(key + "input_norm", prefix + "input_layernorm.weight", c.hidden_size),
            linear(key + "kv_a", {attention + "kv_a_proj_with_mqa": of.key_dim}, c.hidden_size, self.bias),
            vector(key + "kv_norm", attention + "kv_a_layernorm.weight", of.kv_lora_rank),
            linear(key + "kv_b", {attention + "kv_b_proj": kv_size}, of.kv_lora_rank, use=Use.EXACT),
        ]
        if of.q_lora_rank is None:
            found.append(linear(key + "q", {attention + "q_proj": q_size}, c.hidden_size))
        else:
            found += [
                linear(key + "q_a", {attention + "q_a_proj": of.q_lora_rank}, c.hidden_size, self.bias),
                vector(key + "q_norm", attention + "q_a_layernorm.weight", of.q_lora_rank),
                linear(key + "q", {attention + "q_b_proj": q_size}, of.q_lora_rank),
            ]
        return [*found, linear(key + "o", {attention + "o_proj": c.hidden_size}, heads * of.v_head_dim, self.bias)]

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        c, of, key = self.config, self.latent, f"layers.{layer}."
        spec = AttentionSpec(
            layer=layer,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            scale=self.scale,
            rope_cos=self.rope.cos,
            rope_sin=self.rope.sin,
            q_norm=None,
            k_norm=None,
            norm_eps=NORM_EPS,
            interleaved=int(self.interleaved),
            rotary_dim=of.qk_rope_head_dim,
        )
        kv_b, two = as_linear(values[key + "kv_b"]), of.q_lora_rank is not None
        return LatentAttentionBlock(
            norm=norm_weight(c, values[key + "input_norm"]),
            norm_eps=c.rms_norm_eps,
            q=as_linear(values[key + "q"]),
            kv_a=as_linear(values[key + "kv_a"]),
            kv_norm=norm_weight(c, values[key + "kv_norm"]),
            kv_b=kv_b,
            absorbed=kv_b.transposed_heads(c.num_attention_heads, of.qk_nope_head_dim),
            attention=spec,
            o=as_linear(values[key + "o"]),
            q_a=as_linear(values[key + "q_a"]) if two else None,
            q_norm=norm_weight(c, values[key + "q_norm"]) if two else None,
        )
