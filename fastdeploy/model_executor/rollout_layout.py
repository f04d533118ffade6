"""The tensors of PaddlePaddle/FastDeploy's models, beside those of a checkpoint: names, shapes, and how one becomes the
other. FastDeploy multiplies with [in, out] weights, and fuses the projections that read the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastdeploy.model_executor.checkpoint_layout import MODULES, PARTS
from fastdeploy.model_executor.models.interface import EMBEDDING, LM_HEAD, Model
from fastdeploy.model_executor.parameters import Parameter

# The name of FastDeploy's decoder in a model of this architecture; the others have "model", as in checkpoints.
DECODERS = {"Qwen2ForCausalLM": "qwen2", "Ernie4_5ForCausalLM": "ernie", "Ernie4_5_ForCausalLM": "ernie"}
CHECKPOINT_DECODER = "model"
FUSED = {tuple(parts): fused.strip(".") for fused, parts in PARTS.items()}  # q, k and v -> qkv_proj
RENAMED = {ours: theirs for theirs, ours in MODULES.items()}
# The names in a trainer of PaddleFormers, where they differ from FastDeploy's.
TRAINED = {"embed_tokens.embeddings": "embed_tokens", "lm_head.linear": "lm_head", "up_gate_proj": "gate_up_fused_proj"}
SAME_AS_TRAINED = {"ernie": ("up_gate_proj",)}  # by decoder: its trainers have this name, too


class FusedTensor(NamedTuple):
    """One tensor of FastDeploy's model. parts: the checkpoint tensors that it holds side by side in its last dimension,
    each with its size there. transposed: a part is [out, in] in a checkpoint. trained: its name in a trainer."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    transposed: bool
    trained: str

    def places(self) -> dict[str, slice]:
        """Return where each part is in the last dimension, by its checkpoint name."""
        found, start = {}, 0
        for name, size in self.parts:
            found[name] = slice(start, start + size)
            start += size
        return found

    def to_checkpoint(self, value: Any) -> dict[str, Any]:
        """Return the parts of ``value``, an array of Paddle or numpy, as a checkpoint has them."""
        cut = {name: value[..., place] for name, place in self.places().items()}
        return {name: part.T for name, part in cut.items()} if self.transposed else cut


def fused_tensors(model: Model) -> tuple[FusedTensor, ...]:
    """Return all tensors of FastDeploy's model, in the order of ``model.parameters``. Its output layer is a tensor of
    its own, even if it is tied to the embedding."""
    decoder = DECODERS.get(model.config.architecture, CHECKPOINT_DECODER)
    found = [one for parameter in model.parameters for one in _of_parameter(parameter, decoder)]
    if LM_HEAD in model.aliases:
        [embedding] = [one for one in model.parameters if EMBEDDING in one.weights]
        found += _of_parameter(embedding._replace(weights=(LM_HEAD,)), decoder)
    return tuple(found)


def in_decoder(name: str, decoder: str) -> str:
    """Return a checkpoint's name with the name of FastDeploy's decoder."""
    first, dot, rest = name.partition(".")
    return f"{decoder}{dot}{rest}" if first == CHECKPOINT_DECODER else name


def _of_parameter(parameter: Parameter, decoder: str) -> list[FusedTensor]:
    """Return the weight, and the bias if there is one."""
    if parameter.is_vector:
        size = ((parameter.weights[0], parameter.columns),)
        return [_tensor(parameter.weights, (parameter.columns,), size, decoder, transposed=False)]
    sizes = tuple(zip(parameter.weights, parameter.rows, strict=True))
    if parameter.weights == (EMBEDDING,):
        [(name, rows)] = sizes
        return [_tensor((name,), (rows, parameter.columns), ((name, parameter.columns),), decoder, transposed=False)]
    total = sum(parameter.rows)
    weight = _tensor(parameter.weights, (parameter.columns, total), sizes, decoder, transposed=True)
    if not parameter.biases:
        return [weight]
    of_bias = tuple(zip(parameter.biases, parameter.rows, strict=True))
    return [weight, _tensor(parameter.biases, (total,), of_bias, decoder, transposed=False)]


def _tensor(
    names: Sequence[str], shape: tuple[int, ...], parts: tuple[tuple[str, int], ...], decoder: str, transposed: bool
) -> FusedTensor:
    path, kind = in_decoder(names[0], decoder).rpartition(".")[::2]
    parent, dot, module = path.rpartition(".")
    fused = tuple(f".{name.split('.')[-2]}." for name in names)
    here = FUSED[fused] if len(names) > 1 else RENAMED.get(module, module)
    kept: Sequence[str] = SAME_AS_TRAINED.get(decoder, ())
    there = here if here in kept else TRAINED.get(here, here)
    return FusedTensor(f"{parent}{dot}{here}.{kind}", shape, parts, transposed, f"{parent}{dot}{there}.{kind}")


def by_checkpoint_name(tensors: Sequence[FusedTensor], decoder: str) -> Mapping[str, FusedTensor]:
    """Return the tensor that holds each checkpoint tensor, by both names that the decoder may have."""
    pairs = [(name, one) for one in tensors for name, _ in one.parts]
    return {in_decoder(name, decoder): one for name, one in pairs} | dict(pairs)
