"""Layouts of checkpoints: where each tensor of a model lies in the stored tensors.

The rest of the engine knows the Hugging Face layout only: its names, a weight as [out, in], q, k and v apart, gate and
up apart. Fingerprints, sha256 and exports are those of this layout. A Paddle checkpoint is described in it here, before
a value is read: the values of a fused or transposed tensor are picked while they are read (``View``).

A layout is chosen once for a source, by what its folder or its call says, and never by a tensor. A square weight would
look right in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.experts import ERNIE_ROUTER_BIAS
from fastdeploy.core.weight_source import AUTO, HUGGINGFACE, PADDLE, PADDLEFORMERS
from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.models import CONFIG, read_json
from fastdeploy.model_executor.models.interface import EMBEDDING, LM_HEAD, Model
from fastdeploy.model_executor.ops.blocks import MAX_EXPERTS
from fastdeploy.model_executor.ops.interface import View
from fastdeploy.model_executor.safetensors_source import DTYPES, SafetensorsReader, TensorEntry, refuse_tensor

QKV, UP_GATE, GATE_UP = ".qkv_proj.", ".up_gate_proj.", ".gate_up_proj."
PARTS = {QKV: [f".{x}_proj." for x in "qkv"], UP_GATE: [".gate_proj.", ".up_proj."]}
# What the models of FastDeploy name in another way: their modules, and the decoder.
MODULES = {"embed_tokens.embeddings": "embed_tokens", "lm_head.linear": "lm_head", "qk_norm.q_norm": "q_norm",
           "qk_norm.k_norm": "k_norm"}  # fmt: skip
RENAMED = (
    (re.compile(r"^(ernie|qwen2|llama)\."), "model."),
    *((re.compile(rf"(^|\.){re.escape(theirs)}\."), rf"\1{ours}.") for theirs, ours in MODULES.items()),
    (re.compile(r"\.mlp\.experts\.gate_correction_bias$"), ".mlp.moe_statics.e_score_correction_bias"),
)
# All experts of a layer in one tensor, whose first dimension is the expert: in a model of FastDeploy and in one of
# transformers.
STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts\.)(?P<linear>\w+_proj)(?P<paddle>_weight)?")
ALL_EXPERTS = re.compile(r".*\.mlp\.experts\.\w+_proj(_bias)?")  # a checkpoint of gpt-oss has this, in each layout
ROUTER, ROUTER_BIAS = ".mlp.gate.weight", "e_score_correction_bias"
DTYPE_SINCE = (4, 56)  # from this version on transformers writes the key "dtype", as Paddle does


class Layout(NamedTuple):
    """A layout, and what it was chosen by (for messages)."""

    name: str
    reason: str


class _Part(NamedTuple):
    """Columns of a stored tensor that make a tensor of the model. See ``View`` for run and step."""

    name: str
    first: int
    size: int
    run: int
    step: int


def describe(reader: SafetensorsReader, model: Model, declared: str = AUTO) -> None:
    """Replace the entries of ``reader`` by those of the Hugging Face layout, without those that the model ignores, and
    check their names, shapes and types. declared: the layout, or AUTO: what the source says of itself. Raises
    WeightUpdateRefused, which names the tensor as it is stored."""
    layout = find_layout(reader, declared)
    shapes = {name: shape for parameter in model.parameters for name, shape in parameter.shapes.items()}
    shapes |= {alias: shapes[name] for alias, name in model.aliases.items()}
    if layout.name == HUGGINGFACE:
        reader.entries = dict(_of_transformers(reader.entries, shapes))
        _refuse_paddles(reader.entries, shapes, layout)
    else:
        reader.entries = dict(_described(reader.entries, shapes, model.config, layout))
    drop_ignored(reader, model)
    reader.check(shapes)


def drop_ignored(reader: SafetensorsReader, model: Model) -> None:
    """Forget the tensors that the model ignores."""
    reader.entries = {name: entry for name, entry in reader.entries.items() if not name.startswith(model.ignored)}


def find_layout(reader: SafetensorsReader, declared: str = AUTO) -> Layout:
    """Return the layout of a source. A folder tells it by config.json, as FastDeploy and PaddleFormers do. Raises
    WeightUpdateRefused for a config.json that cannot be read."""
    if declared != AUTO:
        return Layout(declared, "the layout of the call")
    if reader.folder is None:
        return Layout(HUGGINGFACE, "no layout in the call")
    try:
        raw = read_json(reader.folder, CONFIG) if reader.folder.has(CONFIG) else {}
    except InvalidField as error:
        raise WeightUpdateRefused(error.message, key=error.field) from error
    paddle = PADDLEFORMERS if "paddleformers_version" in raw else PADDLE
    if reader.has_pdparams:
        return Layout(paddle, "a .pdparams file")
    if raw.get("source") == "paddle":
        return Layout(paddle, f'"source": "paddle" in {CONFIG}')
    if "torch_dtype" in raw or "dtype" not in raw:
        return Layout(HUGGINGFACE, f"torch_dtype, or no dtype, in {CONFIG}")
    if _wrote_dtype(raw.get("transformers_version")):
        return Layout(HUGGINGFACE, f"transformers_version in {CONFIG}")
    return Layout(paddle, f"dtype without torch_dtype and transformers_version in {CONFIG}")


def _wrote_dtype(version: Any) -> bool:
    """Return whether this version of transformers, None for none, writes "dtype" where older ones wrote
    "torch_dtype"."""
    if not isinstance(version, str):
        return False
    found = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return found is None or (int(found[1]), int(found[2])) >= DTYPE_SINCE


def _of_transformers(stored: Mapping[str, TensorEntry], shapes: Container[str]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and entry of each tensor as a checkpoint has it. A model of transformers stacks experts, gate_up_proj
    [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner], and has another name for ERNIE's bias."""
    origins: dict[str, str] = {}
    for stored_name, stored_entry in stored.items():
        renamed = stored_name.replace(*ERNIE_ROUTER_BIAS)
        for name, entry in _unstacked(renamed if renamed in shapes else stored_name, stored_entry, shapes):
            for one, part in _gate_and_up(name, entry):
                if one in origins:
                    raise _refuse_twice(stored_name, entry, origins[one])
                origins[one] = stored_name
                yield one, part


def _gate_and_up(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and entry of gate and up of an expert that has both in one tensor; any other tensor as it is."""
    if ".mlp.experts." not in name or GATE_UP not in name or len(entry.shape) != 2 or entry.shape[0] % 2:
        yield name, entry
        return
    half = entry._replace(shape=(entry.shape[0] // 2, entry.shape[1]), nbytes=entry.nbytes // 2)
    for number, part in enumerate(PARTS[UP_GATE]):
        yield name.replace(GATE_UP, part), half._replace(offset=entry.offset + number * half.nbytes)


def _unstacked(name: str, entry: TensorEntry, shapes: Container[str]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and entry of each expert of a tensor that stacks experts, unless a checkpoint has it so; any other
    tensor as it is."""
    found = STACKED.fullmatch(name)
    if name in shapes or found is None or len(entry.shape) != 3 or not 0 < entry.shape[0] <= MAX_EXPERTS:
        yield name, entry
        return
    nbytes = entry.nbytes // entry.shape[0]
    for expert in range(entry.shape[0]):
        one = entry._replace(shape=entry.shape[1:], offset=entry.offset + expert * nbytes, nbytes=nbytes)
        yield f"{found['experts']}{expert}.{found['linear']}.weight", one


def _described(
    stored: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, layout: Layout
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield name and entry of each tensor in the Hugging Face layout."""
    origins: dict[str, str] = {}
    for stored_name, name, entry in _renamed(stored, shapes):
        parts = list(_parts(name, shapes, config, layout))
        _check_stored(stored_name, name, entry, parts, shapes, layout)
        for part in parts:
            if part.name in origins:
                raise _refuse_twice(stored_name, entry, origins[part.name])
            origins[part.name] = stored_name
            shape = shapes.get(part.name)
            if shape is not None and not _is_kept(name, entry, shape, layout):
                yield part.name, _viewed(entry, part, shape)
            else:
                yield part.name, entry if shape is None else entry._replace(shape=shape)


def _renamed(stored: Mapping[str, TensorEntry], shapes: Container[str]) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yield the stored name of each tensor, its name in a Paddle checkpoint, and its entry. Experts that are stacked
    are one tensor each."""
    for stored_name, stored_entry in stored.items():
        renamed = stored_name
        for pattern, new in RENAMED:
            renamed = pattern.sub(new, renamed)
        for name, entry in _unstacked(renamed, _with_bfloat16(stored_name, stored_entry), shapes):
            yield stored_name, name, entry


def _parts(name: str, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, layout: Layout) -> Iterator[_Part]:
    fused = next((kind for kind in PARTS if kind in name), None)
    names = [name] if fused is None else [name.replace(fused, part) for part in PARTS[fused]]
    if not all(one in shapes for one in names):
        yield _Part(name, 0, 0, 0, 0)  # of no use to this model: the check of names refuses it
        return
    sizes = [shapes[one][0] for one in names]
    groups = config.num_key_value_heads if fused == QKV and layout.name == PADDLEFORMERS else 1
    step, first = sum(sizes) // groups, 0
    for one, size in zip(names, sizes, strict=True):
        run = size // groups
        yield _Part(one, first, size, run, step)
        first += run


def _check_stored(
    stored_name: str,
    name: str,
    entry: TensorEntry,
    parts: list[_Part],
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
) -> None:
    """Raise WeightUpdateRefused unless the stored tensor has the shape of the layout."""
    shape = shapes.get(parts[0].name)
    if shape is None:
        return
    if name.endswith(ROUTER_BIAS):
        expected: list[tuple[int, ...]] = [shape, (1, shape[-1])]  # FastDeploy's models have it as [1, experts]
    elif len(shape) == 1:
        expected = [(sum(part.size for part in parts),)]
    elif name == EMBEDDING or ALL_EXPERTS.fullmatch(name):
        expected = [shape]
    else:
        expected = [(shape[1], sum(part.size for part in parts))]
        if name == LM_HEAD or name.endswith(ROUTER):
            # PaddleFormers keeps the head as [vocabulary, hidden], FastDeploy as [hidden, vocabulary]. The router is
            # [hidden, experts] in both, but [experts, hidden] in PaddleFormers' GLM and DeepSeek.
            expected += [shape]
        if name.endswith(ROUTER) and shape[0] == shape[1]:
            raise refuse_tensor(stored_name, f"of {entry.file} is square: it may be [hidden, experts] or the reverse")
    if entry.shape not in expected:
        wanted = " or ".join(str(list(one)) for one in expected)
        raise _refuse_shape(stored_name, entry, wanted, layout)


def _is_kept(name: str, entry: TensorEntry, shape: tuple[int, ...], layout: Layout) -> bool:
    """Return whether a stored tensor has the orientation of Hugging Face."""
    if name.endswith(ROUTER):
        return entry.shape == shape
    if name != LM_HEAD:
        return name == EMBEDDING or name.endswith(ROUTER_BIAS) or ALL_EXPERTS.fullmatch(name) is not None
    return entry.shape == shape and (shape[0] != shape[1] or layout.name == PADDLEFORMERS)


def _viewed(entry: TensorEntry, part: _Part, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry of a tensor of this shape that is a part of a stored one."""
    rows, columns, stride = shape[0], 1 if len(shape) == 1 else shape[1], entry.shape[-1]
    if columns == 1 and rows == stride:
        return entry
    size = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else 0  # the check of types refuses it
    view = View(stride, part.run, part.step)
    offset = entry.offset + part.first * size
    return entry._replace(shape=shape, offset=offset, nbytes=rows * columns * size, view=view)


def _with_bfloat16(name: str, entry: TensorEntry) -> TensorEntry:
    """Return an entry of uint16, in which Paddle keeps bfloat16 on a CPU, as one of bfloat16; any other as it is."""
    if entry.dtype != "U16":
        return entry
    if 2 * math.prod(entry.shape) != entry.nbytes:
        raise refuse_tensor(name, f"of {entry.file}: {entry.nbytes} bytes do not make U16 of shape {list(entry.shape)}")
    return entry._replace(dtype="BF16")


def _refuse_paddles(entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
    """Refuse a fused or transposed tensor, with the reason why it is read in the layout of Hugging Face."""
    for name, entry in entries.items():
        if name not in shapes and any(kind in name for kind in PARTS):
            what = f"is fused, which no tensor is in the layout {layout.name!r}, which was chosen by {layout.reason}"
            raise refuse_tensor(name, f"of {entry.file} {what}")
        if len(entry.shape) == 2 and entry.shape == shapes.get(name, ())[::-1] != shapes[name]:
            raise _refuse_shape(name, entry, str(list(shapes[name])), layout)


def _refuse_twice(name: str, entry: TensorEntry, other: str) -> WeightUpdateRefused:
    return refuse_tensor(name, f"of {entry.file} has the values of {other}, too")


def _refuse_shape(name: str, entry: TensorEntry, expected: str, layout: Layout) -> WeightUpdateRefused:
    what = f"expected {expected} in the layout {layout.name!r}, which was chosen by {layout.reason}"
    return refuse_tensor(name, f"of {entry.file} has shape {list(entry.shape)}; {what}")
