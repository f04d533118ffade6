"""The builder of mixtures of experts, and what configs say about them. Tensor names are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.model_executor.model_config import ModelConfig, count, flag, positive
from fastdeploy.model_executor.models.decoder import ByLayer, Mlp
from fastdeploy.model_executor.models.interface import norm_weight
from fastdeploy.model_executor.ops.blocks import (
    MAX_EXPERTS,
    MAX_GROUPS,
    Activation,
    Block,
    ExpertsBlock,
    RouterScore,
    RouterSpec,
)
from fastdeploy.model_executor.parameters import (
    Parameter,
    Use,
    Value,
    as_linear,
    as_vector,
    experts_linear,
    linear,
    vector,
)

GATE_UP, DOWN = "experts_gate_up", "experts_down"  # the ends of the keys of parameters
MULTIPLE = 16  # sizes of experts: a packed weight has whole tiles of columns for each expert
DEEPSEEK_KEYS = {
    "experts": "n_routed_experts",
    "inner": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
}


class Mixture(NamedTuple):
    """The experts of a config. layers: the numbers of the layers with experts, ascending. inner: the width of each
    expert. top_k to norm_min: see ``RouterSpec``. shared_inner: the width of the MLP that all rows have, 0
    without."""

    layers: tuple[int, ...]
    experts: int
    inner: int
    top_k: int
    score: RouterScore
    groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0
    norm_min: float = RouterSpec._field_defaults["norm_min"]
    shared_inner: int = 0


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """The config of a model with experts in some or all layers."""

    mixture: Mixture


def check_mixture(mixture: Mixture, hidden: int, keys: Mapping[str, str]) -> Mixture:
    """Return the mixture. Raises InvalidField for sizes that cannot be computed. hidden: the size of the residual.
    keys: the key in config.json of each field that is checked: experts, inner, top_k, groups, top_groups."""

    def refuse(field: str, expected: str) -> InvalidField:
        return InvalidField(keys.get(field, field), f"expected {expected}, got {getattr(mixture, field)}")

    if hidden % MULTIPLE:
        raise InvalidField("hidden_size", f"expected a multiple of {MULTIPLE} for a mixture of experts, got {hidden}")
    if mixture.inner % MULTIPLE:
        raise refuse("inner", f"a multiple of {MULTIPLE}")
    if mixture.experts > MAX_EXPERTS:
        raise refuse("experts", f"at most {MAX_EXPERTS}")
    if mixture.experts % mixture.groups or mixture.groups > MAX_GROUPS:
        raise refuse("groups", f"a divisor of {mixture.experts} (the experts) up to {MAX_GROUPS}")
    if mixture.top_groups > mixture.groups:
        raise refuse("top_groups", f"at most {mixture.groups} (the groups)")
    allowed = mixture.experts // mixture.groups * mixture.top_groups
    if mixture.top_k > allowed:
        raise refuse("top_k", f"at most {allowed} (the experts that may be chosen)")
    return mixture


def read_mixture(raw: dict[str, Any], config: ModelConfig, score: RouterScore) -> Mixture:
    """Read the mixture of a config with the keys of DeepSeek: the first layers are dense, the others have experts and a
    shared MLP. config: the common part. Raises InvalidField."""
    dense, layers = count(raw, "first_k_dense_replace", least=0), config.num_hidden_layers
    if dense >= layers:
        raise InvalidField("first_k_dense_replace", f"expected less than {layers} (num_hidden_layers), got {dense}")
    inner = count(raw, "moe_intermediate_size")
    mixture = Mixture(
        layers=tuple(range(dense, layers)),
        experts=count(raw, "n_routed_experts"),
        inner=inner,
        top_k=count(raw, "num_experts_per_tok"),
        score=score,
        groups=count(raw, "n_group"),
        top_groups=count(raw, "topk_group"),
        normalize=flag(raw, "norm_topk_prob"),
        scale=positive(raw, "routed_scaling_factor"),
        shared_inner=inner * count(raw, "n_shared_experts", least=0),
    )
    return check_mixture(mixture, config.hidden_size, DEEPSEEK_KEYS)


def experts_of_config(config: ModelConfig) -> ExpertsInfo | None:
    """Return the experts layers of a config; None for a dense model."""
    if not isinstance(config, MixtureConfig):
        return None
    mixture = config.mixture
    return ExpertsInfo(mixture.layers, config.num_hidden_layers, mixture.experts, mixture.top_k)


def of_experts(parameter: Parameter) -> bool:
    """Return whether a parameter contains the experts that a router chooses from."""
    return parameter.key.endswith(("." + GATE_UP, "." + DOWN))


@dataclass(frozen=True)
class Experts:
    """The builder of blocks with experts. router, bias: the names of the router and of its bias for the choice (""
    without) in ``mlp``; bias_is_row: a checkpoint has this bias as [1, experts]. router_bias: the router's linear has a
    bias. fused: tensors have all experts (``experts_linear``), with biases, and the rows of gate and up take turns."""

    config: MixtureConfig
    router: str = "gate"
    bias: str = ""
    bias_is_row: bool = False
    router_bias: bool = False
    activation: Activation = Activation.SILU
    fused: bool = False

    def parameters(self, layer: int) -> list[Parameter]:
        """See ``BlockBuilder.parameters``."""
        c, of, key, prefix = self.config, self.config.mixture, f"layers.{layer}.", f"model.layers.{layer}."
        hidden, mlp = c.hidden_size, prefix + "mlp."
        found = [
            vector(key + "post_norm", prefix + "post_attention_layernorm.weight", hidden),
            linear(key + "router", {mlp + self.router: of.experts}, hidden, self.router_bias, Use.EXACT),
            *self._experts(key, mlp + "experts."),
        ]
        if self.bias:
            found.append(vector(key + "router_bias", mlp + self.bias, of.experts, self.bias_is_row))
        if of.shared_inner:
            shared = mlp + "shared_experts."
            gate_up = {f"{shared}{name}_proj": of.shared_inner for name in ("gate", "up")}
            found += [
                linear(key + "shared_gate_up", gate_up, hidden, use=Use.QUANTIZED),
                linear(key + "shared_down", {shared + "down_proj": hidden}, of.shared_inner, use=Use.QUANTIZED),
            ]
        return found

    def _experts(self, key: str, prefix: str) -> list[Parameter]:
        """Return the two linears of the experts. prefix: of the names of their tensors."""
        hidden, of, keys = self.config.hidden_size, self.config.mixture, (key + GATE_UP, key + DOWN)
        if self.fused:
            both, down_proj = ((f"{prefix}{name}_proj", f"{prefix}{name}_proj_bias") for name in ("gate_up", "down"))
            return [
                experts_linear(keys[0], both, of.experts, 2 * of.inner, hidden, interleaved=True),
                experts_linear(keys[1], down_proj, of.experts, hidden, of.inner),
            ]
        experts = [f"{prefix}{i}." for i in range(of.experts)]
        gate_up = {f"{expert}{name}_proj": of.inner for expert in experts for name in ("gate", "up")}
        down = {f"{expert}down_proj": hidden for expert in experts}
        return [
            linear(keys[0], gate_up, hidden, use=Use.QUANTIZED),
            linear(keys[1], down, of.inner, use=Use.QUANTIZED),
        ]

    def build(self, values: Mapping[str, Value], layer: int) -> Block:
        """See ``BlockBuilder.build``."""
        c, of, key = self.config, self.config.mixture, f"layers.{layer}."
        spec = RouterSpec(
            place=of.layers.index(layer),
            top_k=of.top_k,
            score=of.score,
            groups=of.groups,
            top_groups=of.top_groups,
            normalize=int(of.normalize),
            scale=of.scale,
            bias=as_vector(values[key + "router_bias"]) if self.bias else None,
            norm_min=of.norm_min,
        )
        return ExpertsBlock(
            norm=norm_weight(c, values[key + "post_norm"]),
            norm_eps=c.rms_norm_eps,
            router=as_linear(values[key + "router"]),
            routing=spec,
            gate_up=as_linear(values[key + GATE_UP]),
            down=as_linear(values[key + DOWN]),
            activation=self.activation,
            shared_gate_up=as_linear(values[key + "shared_gate_up"]) if of.shared_inner else None,
            shared_down=as_linear(values[key + "shared_down"]) if of.shared_inner else None,
        )


def mlp_or_experts(experts: Experts) -> ByLayer:
    """Return the builder of the second block of every layer: experts where the mixture has them, else an MLP."""
    config, mlp = experts.config, Mlp(experts.config)
    return ByLayer([experts if i in config.mixture.layers else mlp for i in range(config.num_hidden_layers)])


def layers_behind(config: ModelConfig, more: int) -> tuple[str, ...]:
    """Return how the names begin of the tensors of ``more`` layers behind the model's own: layers of a checkpoint that
    predict further tokens, see ``Model.ignored``."""
    return tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(more))
