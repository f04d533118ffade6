"""Reading of PEFT adapters: a folder with adapter_config.json and adapter_model.safetensors becomes a PackedAdapter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy.core.files import Folder
from fastdeploy.core.fingerprint import Fingerprint, fingerprint, over_all
from fastdeploy.core.serving_dtype import fits, in_dtype
from fastdeploy.core.weight_source import ADAPTER_CONFIG, ADAPTER_TENSORS
from fastdeploy.model_executor.lora_config import (
    LoraSetting,
    Modules,
    check_expressions,
    read_lora_config,
    refuse_field,
)
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops.interface import LoraPart, Ops, PackedAdapter, PackedLora
from fastdeploy.model_executor.parameters import Parameter, Use
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, refuse_file, refuse_tensor

MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """A packed adapter. rank: the largest of its modules. fingerprint: see ``AdapterInfo`` (core/runner.py)."""

    packed: PackedAdapter
    rank: int
    fingerprint: str


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
            fd = folder.open(ADAPTER_TENSORS)
        except OSError as error:
            raise refuse_file(ADAPTER_TENSORS, f"cannot be opened: {error.strerror}") from error
        reader.add_file(ADAPTER_TENSORS, fd)
        if "target_modules" in config and config["target_modules"] is None:
            config["target_modules"] = _modules_with_tensors(reader)
        settings = read_lora_config(config, _modules(model), max_rank)
        _check(reader, _expected_shapes(model, settings), _base_copies(model, settings))
        tensors = _Tensors(model.ops, reader)
        loras = {
            parameter.key: _pack(model.ops, parameter, settings, tensors)
            for parameter in model.adaptable
            if any(_module(name) in settings for name in parameter.weights)
        }
    rank = max(setting.rank for setting in settings.values())
    return Adapter(model.assemble_adapter(loras), rank, _fingerprint(tensors.fingerprints, settings))


def check_config(config: bytes, model: Model) -> None:
    """Check the fields and the regular expressions of an adapter_config.json before its tensors are there. Raises
    WeightUpdateRefused, which names the field."""
    fields = _parse_config(config)
    if "target_modules" in fields and fields["target_modules"] is None:  # the tensors tell them
        fields["target_modules"] = []
    check_expressions(fields, _modules(model))


def _read_config(folder: Folder) -> dict[str, Any]:
    try:
        return _parse_config(folder.read(ADAPTER_CONFIG, MAX_CONFIG_BYTES))
    except OSError as error:
        raise refuse_file(ADAPTER_CONFIG, f"cannot be read: {error.strerror}") from error


def _parse_config(data: bytes) -> dict[str, Any]:
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refuse_file(ADAPTER_CONFIG, f"is not as expected: {error}") from error
    return {field: _parse_field(field, part) for field, part in parts.items()}


def _parse_field(field: str, part: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(part)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refuse_field(field, f"is not as expected: {error}") from error


def _modules_with_tensors(reader: SafetensorsReader) -> list[str]:
    """Return the modules that have tensors in the file. They are the targets of a config whose target_modules is null,
    as SkyRL's JAX trainer writes it."""
    names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in reader.entries}
    return sorted(names)


def _modules(model: Model) -> Modules:
    linears = [_module(name) for parameter in model.adaptable for name in parameter.weights]
    modules = {_module(name): one for one in model.parameters for name in one.weights}
    experts = [name for name, one in modules.items() if not one.is_vector and one.use is not Use.ADAPTED]
    others = modules.keys() - {*linears, *experts}
    return Modules(tuple(linears), linears[-1], tuple(sorted(others)), tuple(experts))


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
            raise refuse_tensor(name, f"in {ADAPTER_TENSORS} belongs to no module that {ADAPTER_CONFIG} targets")
    reader.check({**expected, **copies})
    for name in expected:
        if name not in reader.entries:
            raise refuse_tensor(name, f"is missing in {ADAPTER_TENSORS}: {ADAPTER_CONFIG} targets its module")


class _Tensors:
    """The tensors of an adapter. fingerprints: of those that were read."""

    def __init__(self, ops: Ops, reader: SafetensorsReader):
        self._ops, self._reader = ops, reader
        self.fingerprints: dict[str, Fingerprint] = {}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the serving dtype. Raises WeightUpdateRefused."""
        array = self._reader.read(name)
        if not fits(array, self._ops.dtype):
            raise refuse_tensor(name, f"of {ADAPTER_TENSORS} has values too large for {self._ops.dtype}")
        values = np.ascontiguousarray(in_dtype(array, self._ops.dtype))
        self.fingerprints[name] = fingerprint(values)
        return values


def _fingerprint(tensors: Mapping[str, Fingerprint], settings: Mapping[str, LoraSetting]) -> str:
    """Return the fingerprint of an adapter: the sha256, in hex, of the line of all tensors (``over_all``), and the
    lines "module:rank:scaling", sorted by module."""
    of_modules = (f"{module}:{settings[module].rank}:{settings[module].scaling!r}\n" for module in sorted(settings))
    return hashlib.sha256(f"{over_all(tensors)}\n{''.join(of_modules)}".encode()).hexdigest()


def _pack(ops: Ops, parameter: Parameter, settings: Mapping[str, LoraSetting], tensors: _Tensors) -> PackedLora:
    """Read and pack the adapters of the projections that one linear stacks."""
    parts = [
        LoraPart(tensors.read(_a(weight)), tensors.read(_b(weight)), settings[_module(weight)].scaling)
        if _module(weight) in settings
        else None
        for weight in parameter.weights
    ]
    return ops.pack_lora(parts, parameter.rows, parameter.columns)
