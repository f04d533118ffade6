"""Reading of PEFT adapters: a folder with adapter_config.json and adapter_model.safetensors becomes a PackedAdapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy.core.safe_files import Folder
from fastdeploy.core.serving_dtype import fits, in_dtype
from fastdeploy.model_executor.lora_config import CONFIG, LoraSetting, Modules, read_lora_config
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import LoraPart, Ops, PackedAdapter, PackedLora
from fastdeploy.model_executor.parameters import Parameter
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_file, refuse_tensor

TENSORS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """A packed adapter. rank: the largest of its modules."""

    packed: PackedAdapter
    rank: int


def read_adapter(path: str, model: Model, max_rank: int) -> Adapter:
    """Read, check and pack the PEFT folder ``path``. Raises WeightUpdateRefused, which names the file, the field or the
    tensor, and MemoryError."""
    try:
        folder = Folder(path)
    except OSError as error:
        raise refuse_file(path, f"cannot be opened as a folder: {error.strerror}") from error
    with folder, SafetensorsReader() as reader:
        config = _read_config(folder)
        try:
            fd = folder.open(TENSORS)
        except OSError as error:
            raise refuse_file(TENSORS, f"cannot be opened: {error.strerror}") from error
        reader.add_file(TENSORS, fd)
        if "target_modules" in config and config["target_modules"] is None:
            config["target_modules"] = _modules_with_tensors(reader)
        settings = read_lora_config(config, _modules(model), max_rank)
        _check(reader, _expected_shapes(model, settings), _base_copies(model, settings))
        loras = {
            parameter.key: _pack(model.ops, parameter, settings, reader)
            for parameter in model.adaptable
            if any(_module(name) in settings for name in parameter.weights)
        }
    return Adapter(model.assemble_adapter(loras), max(setting.rank for setting in settings.values()))


def _read_config(folder: Folder) -> dict[str, Any]:
    try:
        return msgspec.json.decode(folder.read(CONFIG, MAX_CONFIG_BYTES), type=dict[str, Any])
    except OSError as error:
        raise refuse_file(CONFIG, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refuse_file(CONFIG, f"is not as expected: {error}") from error


def _modules_with_tensors(reader: SafetensorsReader) -> list[str]:
    """Return the modules that have tensors in the file. They are the targets of a config whose target_modules is null,
    as SkyRL's JAX trainer writes it."""
    names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in reader.entries}
    return sorted(names)


def _modules(model: Model) -> Modules:
    linears = [_module(name) for parameter in model.adaptable for name in parameter.weights]
    others = {_module(name) for parameter in model.parameters for name in parameter.weights} - set(linears)
    output = model.adaptable[-1].weights[0]
    return Modules(tuple(linears), _module(output), tuple(sorted(others)))


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _a(weight: str) -> str:
    return f"{PREFIX}{_module(weight)}.lora_A.weight"


def _b(weight: str) -> str:
    return f"{PREFIX}{_module(weight)}.lora_B.weight"


def _expected_shapes(model: Model, settings: Mapping[str, LoraSetting]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the adapter must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in model.adaptable:
        for weight, rows in zip(parameter.weights, parameter.rows, strict=True):
            if (setting := settings.get(_module(weight))) is not None:
                shapes[_a(weight)], shapes[_b(weight)] = (setting.rank, parameter.columns), (rows, setting.rank)
    return shapes


def _base_copies(model: Model, settings: Mapping[str, LoraSetting]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of the copy of the base weight that PEFT saves with an adapter of the output layer. The
    copy is not read: an adapter never changes base weights."""
    output = model.adaptable[-1]
    module = _module(output.weights[0])
    return {f"{PREFIX}{module}.base_layer.weight": (output.rows[0], output.columns)} if module in settings else {}


def _check(
    reader: SafetensorsReader, expected: Mapping[str, tuple[int, ...]], copies: Mapping[str, tuple[int, ...]]
) -> None:
    """Check all that the header tells, before a tensor is read. copies: tensors that may be there and are not read."""
    for name in reader.entries:
        if name not in expected and name not in copies:
            raise refuse_tensor(name, f"in {TENSORS} belongs to no module that {CONFIG} targets")
    reader.check({**expected, **copies})
    for name in expected:
        if name not in reader.entries:
            raise refuse_tensor(name, f"is missing in {TENSORS}: {CONFIG} targets its module")


def _pack(ops: Ops, parameter: Parameter, settings: Mapping[str, LoraSetting], reader: SafetensorsReader) -> PackedLora:
    """Read and pack the adapters of the projections that one linear stacks."""
    parts = [
        LoraPart(_read(ops, reader, _a(weight)), _read(ops, reader, _b(weight)), settings[_module(weight)].scaling)
        if _module(weight) in settings
        else None
        for weight in parameter.weights
    ]
    return ops.pack_lora(parts, parameter.rows, parameter.columns)


def _read(ops: Ops, reader: SafetensorsReader, name: str) -> np.ndarray:
    array = reader.read(name)
    if not fits(array, ops.dtype):
        raise refuse_tensor(name, f"of {TENSORS} has values too large for {ops.dtype}")
    return np.ascontiguousarray(in_dtype(array, ops.dtype))
