"""Safetensors files with numpy: read them, write them, and copy a checkpoint with slightly other weights.

numpy has no bfloat16: here such values are uint16 bit patterns, or float32 after :func:`float32_tensors`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdeploy.core.serving_dtype import in_dtype, widen

WEIGHTS = "model.safetensors"
DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8", "uint8": "U8"}  # numpy's: safetensors'


class Entry(NamedTuple):
    """A tensor of a file. start, end: of its bytes, in the file."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


def entries(raw: bytes | bytearray) -> Iterator[Entry]:
    """Yield the tensors of a safetensors file, in its order."""
    base = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:base]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Entry(name, entry["dtype"], entry["shape"], base + start, base + end)


def head(tensors: Iterable[tuple[str, str, Sequence[int], int]], **metadata: str) -> bytes:
    """Return the beginning of a safetensors file: the length of the header in 8 bytes, then the header, padded to whole
    8 bytes (https://github.com/huggingface/safetensors). tensors: name, dtype, shape and bytes of each, in the order of
    the data that follows."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert finite values to bfloat16 bit patterns (uint16), rounded to nearest, ties to even."""
    return in_dtype(np.ascontiguousarray(values, np.float32), "bfloat16")


def to_float32(data: bytes | bytearray) -> np.ndarray:
    """Return the values of bfloat16 bytes, flat."""
    return widen(np.frombuffer(data, "<u2"))


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] = DTYPES) -> None:
    """Write a safetensors file. dtypes: what the header calls the dtype of an array, by numpy's name. Raises KeyError
    for another dtype."""
    with path.open("wb") as file:
        file.write(head((name, dtypes[a.dtype.name], a.shape, a.nbytes) for name, a in tensors.items()))
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def float32_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of ``folder``/model.safetensors as float32, sorted by name: a state dict that
    ``RolloutClient.publish`` takes. Raises ValueError for a tensor that is neither bfloat16 nor float32."""
    raw = (folder / WEIGHTS).read_bytes()
    return {entry.name: _values(raw, entry).reshape(entry.shape) for entry in sorted(entries(raw))}


def perturbed_copy(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copy ``source`` (one safetensors file of bfloat16 or float32) to the new folder ``target``, each weight times
    1 + scale * N(0, 1), as a trainer's next step would publish. Raises ValueError for another dtype."""
    shutil.copytree(source, target)
    raw = bytearray((source / WEIGHTS).read_bytes())
    rng = np.random.default_rng(seed)
    for entry in entries(raw):
        values = _values(raw, entry)
        values = values * (1 + scale * rng.standard_normal(values.shape, np.float32))
        raw[entry.start : entry.end] = (to_bfloat16(values) if entry.dtype == "BF16" else values).tobytes()
    (target / WEIGHTS).write_bytes(raw)


def _values(raw: bytes | bytearray, entry: Entry) -> np.ndarray:
    """Return the values of a tensor as float32, flat."""
    data = raw[entry.start : entry.end]
    if entry.dtype == "BF16":
        return to_float32(data)
    if entry.dtype == "F32":
        return np.frombuffer(data, "<f4").copy()
    raise ValueError(f"{entry.name}: expected BF16 or F32, got {entry.dtype}")
