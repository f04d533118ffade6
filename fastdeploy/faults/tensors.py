"""Sources of weights whose tensors are wrong. Layout of safetensors (https://github.com/huggingface/safetensors): the
length of the header in 8 bytes, little endian; the header, JSON; the data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import FolderSource, SharedMemorySource, Source
from fastdeploy.faults.rules import Rule

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}
CHECKSUMS = "checksums.json"


class Tensor(NamedTuple):
    """One tensor of a file. dtype: as safetensors writes it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]


def read_source(source: Source) -> Tensors:
    """Return all tensors of a source. Raises InvalidField if it has no safetensors."""
    try:
        files = _files(source)
        nbytes = source.nbytes if isinstance(source, SharedMemorySource) else 0
        tensors = {name: tensor for file in files for name, tensor in parse(_read(file, nbytes)).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidField("source", f"no fault can be put into it: {error}") from error
    if not tensors:
        raise InvalidField("source", "no fault can be put into it: expected safetensors")
    return tensors


def _files(source: Source) -> list[Path]:
    return sorted(Path(source.path).glob("*.safetensors")) if isinstance(source, FolderSource) else [Path(source.file)]


def names_of(source: Source) -> list[str]:
    """Return the names of a source's tensors; none if it has no safetensors, which the engine will refuse."""
    try:
        return list(read_source(source))
    except InvalidField:
        return []


def checksums_of(source: Source) -> dict[str, str]:
    """Return the checksums that a folder has beside its tensors."""
    path = Path(source.path, CHECKSUMS) if isinstance(source, FolderSource) else None
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def _read(path: Path, nbytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(nbytes) if nbytes else file.read()


def parse(raw: bytes) -> Tensors:
    """Return the tensors of a safetensors file. Raises ValueError, KeyError or TypeError for a file that is none."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[start + begin : start + end])
    return tensors


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *(tensor.data for tensor in tensors.values())])


def chosen(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that a pattern of shells means."""
    return [name for name in names if fnmatchcase(name, pattern)]


def changed(tensors: Tensors, rule: Rule, number: int, served: Tensors) -> Tensors:
    """Return ``tensors`` with the fault of ``rule``. number: of the request, which chooses bits with the seed. served:
    the tensors that serve, if the fault needs them."""
    pattern = str(rule.parameters.get("tensors", "*"))
    result = dict(tensors)
    for name in chosen(tensors, pattern):
        tensor = tensors[name]
        match rule.fault:
            case "bits_flipped":
                seed = f"{rule.seed}:{rule.name}:{number}:{name}"
                result[name] = tensor._replace(data=flipped(tensor.data, int(rule.parameters["bits"]), seed))
            case "tensors_transposed":
                result[name] = tensor._replace(data=transposed(tensor))
            case "tensors_scaled":
                result[name] = tensor._replace(data=scaled(tensor, float(rule.parameters["factor"])))
            case _:
                result[name] = stale(tensor, served.get(name))
    return result


def flipped(data: bytes, bits: int, seed: str) -> bytes:
    """Return ``data`` with so many different bits flipped, or all of them."""
    array = bytearray(data)
    for place in random.Random(seed).sample(range(8 * len(array)), min(bits, 8 * len(array))):
        array[place // 8] ^= 1 << place % 8
    return bytes(array)


def transposed(tensor: Tensor) -> bytes:
    """Return the data of the transposed matrix. Of more dimensions, the last two are exchanged."""
    size = ITEM_BYTES.get(tensor.dtype, 0)
    if len(tensor.shape) < 2 or not size:
        return tensor.data
    items = np.frombuffer(tensor.data, dtype=f"u{size}").reshape(tensor.shape)
    return items.swapaxes(-1, -2).tobytes()


def scaled(tensor: Tensor, factor: float) -> bytes:
    """Return the data multiplied by ``factor``. Integers stay."""
    values = _floats(tensor)
    return tensor.data if values is None else _bytes(values * np.float32(factor), tensor.dtype)


def stale(tensor: Tensor, served: Tensor | None) -> Tensor:
    """Return the values that serve, in the dtype of ``tensor``. A tensor that serves under no such name stays."""
    if served is None or served.shape != tensor.shape:
        return tensor
    if served.dtype == tensor.dtype:
        return served
    values = _floats(served)
    return tensor if values is None else tensor._replace(data=_bytes(values, tensor.dtype))


def _floats(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    if tensor.dtype == "BF16":
        return (np.frombuffer(tensor.data, dtype="<u2").astype("<u4") << 16).view("<f4")
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}.get(tensor.dtype)
    return None if kind is None else np.frombuffer(tensor.data, dtype=kind).astype("<f4")


def _bytes(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Return float32 values in another dtype. bfloat16: rounded to nearest, halves to even, as Paddle and torch do."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"F64": "<f8", "F16": "<f2"}.get(dtype, "<f4")).tobytes()
