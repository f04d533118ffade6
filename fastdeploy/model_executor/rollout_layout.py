"""The tensors of PaddlePaddle/FastDeploy's models, beside those of a checkpoint: names, shapes, and how one becomes the
other. FastDeploy multiplies with [in, out] weights, and fuses the projections that read the same input."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.checkpoint_layout import MODULES, PARTS
from fastdeploy.model_executor.models.interface import EMBEDDING, LM_HEAD, Model
from fastdeploy.model_executor.parameters import Parameter

# The name of FastDeploy's decoder in a model of this architecture; the others have "model", as in checkpoints.
DECODERS = {"Qwen2ForCausalLM": "qwen2"} | dict.fromkeys(
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM"), "ernie"
)
CHECKPOINT_DECODER = "model"
FUSED = {tuple(parts): fused.strip(".") for fused, parts in PARTS.items()}  # q, k and v -> qkv_proj
RENAMED = {ours: theirs for theirs, ours in MODULES.items()}
# The names in a trainer of PaddleFormers, where they differ from FastDeploy's.
TRAINED = {"embed_tokens.embeddings": "embed_tokens", "lm_head.linear": "lm_head", "up_gate_proj": "gate_up_fused_proj"}
SAME_AS_TRAINED = ("up_gate_proj",)  # trainers of ERNIE, and of mixtures of experts, have this name, too
EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<linear>\w+)\.weight")
ERNIE_BIAS = "moe_statics.e_score_correction_bias", "experts.gate_correction_bias"


class FusedTensor(NamedTuple):
    """One tensor of FastDeploy's model. parts: the checkpoint tensors that it holds side by side in its last dimension,
    each with its size there. transposed: a part is [out, in] in a checkpoint. trained: its name in a trainer. experts:
    the first dimension, if the tensor stacks experts, which have a name each in a trainer; parts are those of the first
    expert, then of the next one."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    transposed: bool
    trained: str | list[str]
    experts: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is one checkpoint tensor."""
        return len(self.parts) == 1 and not self.experts

    @property
    def is_float32(self) -> bool:
        """Whether the tensor is of a router, which FastDeploy keeps in float32."""
        return self.name.endswith((".mlp.gate.weight", "correction_bias"))

    def places(self) -> dict[str, tuple[Any, ...]]:
        """Return the index of each part, by its checkpoint name."""
        found: dict[str, tuple[Any, ...]] = {}
        of_expert, start = len(self.parts) // max(1, self.experts), 0
        for number, (name, size) in enumerate(self.parts):
            start = 0 if number % of_expert == 0 else start
            here = slice(start, start + size)
            found[name] = (number // of_expert, slice(None), here) if self.experts else (..., here)
            start += size
        return found

    def to_checkpoint(self, value: Any) -> dict[str, Any]:
        """Return the parts of ``value``, an array of Paddle or numpy, as a checkpoint has them."""
        cut = {name: value[place] for name, place in self.places().items()}
        return {name: part.T for name, part in cut.items()} if self.transposed else cut


def fused_tensors(model: Model) -> tuple[FusedTensor, ...]:
    """Return all tensors of FastDeploy's model, in the order of ``model.parameters``. Its output layer is a tensor of
    its own, even if it is tied to the embedding."""
    decoder = DECODERS.get(model.config.architecture, CHECKPOINT_DECODER)
    is_mixture = any(EXPERT.fullmatch(parameter.weights[0]) for parameter in model.parameters)
    kept = SAME_AS_TRAINED if is_mixture or decoder == "ernie" else ()
    found = [one for parameter in model.parameters for one in _of_parameter(parameter, decoder, kept)]
    if LM_HEAD in model.aliases:
        [embedding] = [one for one in model.parameters if EMBEDDING in one.weights]
        found += _of_parameter(embedding._replace(weights=(LM_HEAD,)), decoder, kept)
    return tuple(found)


def in_decoder(name: str, decoder: str) -> str:
    """Return a checkpoint's name with the name of FastDeploy's decoder."""
    first, dot, rest = name.partition(".")
    return f"{decoder}{dot}{rest}" if first == CHECKPOINT_DECODER else name


def _of_parameter(parameter: Parameter, decoder: str, kept: Sequence[str]) -> list[FusedTensor]:
    """Return the weight, and the bias if there is one. kept: what FastDeploy and a trainer call by the same name."""
    if parameter.experts:
        raise InvalidField("architectures", f"{parameter.weights[0]}: FastDeploy's layout of it is not supported")
    if parameter.is_vector:
        [(name, shape)] = parameter.shapes.items()
        one = _tensor((name,), shape, ((name, parameter.columns),), decoder, kept, transposed=False)
        return [one._replace(name=one.name.replace(*ERNIE_BIAS))]
    sizes = tuple(zip(parameter.weights, parameter.rows, strict=True))
    if EXPERT.fullmatch(parameter.weights[0]):
        return [_experts(parameter, sizes, decoder)]
    if parameter.weights == (EMBEDDING,):
        [(name, rows)] = sizes
        parts = ((name, parameter.columns),)
        return [_tensor((name,), (rows, parameter.columns), parts, decoder, kept, transposed=False)]
    total = sum(parameter.rows)
    weight = _tensor(parameter.weights, (parameter.columns, total), sizes, decoder, kept, transposed=True)
    if not parameter.biases:
        return [weight]
    of_bias = tuple(zip(parameter.biases, parameter.rows, strict=True))
    return [weight, _tensor(parameter.biases, (total,), of_bias, decoder, kept, transposed=False)]


def _experts(parameter: Parameter, sizes: tuple[tuple[str, int], ...], decoder: str) -> FusedTensor:
    """Return the tensor that stacks the experts of a layer: [experts, in, out]."""
    names = [found for name in parameter.weights if (found := EXPERT.fullmatch(name)) is not None]
    count = len({found["expert"] for found in names})
    linears = [found["linear"] for found in names[: len(names) // count]]
    linear = FUSED[tuple(f".{one}." for one in linears)] if len(linears) > 1 else linears[0]
    prefix = in_decoder(names[0]["experts"], decoder)
    shape = (count, parameter.columns, sum(parameter.rows) // count)
    trained = [f"{prefix}{expert}.{linear}.weight" for expert in range(count)]
    return FusedTensor(f"{prefix}{linear}_weight", shape, sizes, True, trained, count)


def _tensor(
    names: Sequence[str],
    shape: tuple[int, ...],
    parts: tuple[tuple[str, int], ...],
    decoder: str,
    kept: Sequence[str],
    transposed: bool,
) -> FusedTensor:
    path, kind = in_decoder(names[0], decoder).rpartition(".")[::2]
    parent, dot, module = path.rpartition(".")
    fused = tuple(f".{name.split('.')[-2]}." for name in names)
    here = FUSED[fused] if len(names) > 1 else RENAMED.get(module, module)
    there = here if here in kept else TRAINED.get(here, here)
    return FusedTensor(f"{parent}{dot}{here}.{kind}", shape, parts, transposed, f"{parent}{dot}{there}.{kind}")


def by_checkpoint_name(tensors: Sequence[FusedTensor], decoder: str) -> Mapping[str, FusedTensor]:
    """Return the tensor that holds each checkpoint tensor, by both names that the decoder may have."""
    pairs = [(name, one) for one in tensors for name, _ in one.parts]
    return {in_decoder(name, decoder): one for name, one in pairs} | dict(pairs)
