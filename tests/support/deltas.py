"""Deltas between states of a model. A state is {tensor: its values in the serving dtype, float32 or bfloat16 bits}."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.core.serving_dtype import dtype_of
from fastdeploy.core.weight_source import FileSource, PartFormat
from fastdeploy.testing.tensors import to_bfloat16, write_safetensors

State = dict[str, np.ndarray]


def state_of(tensors: Mapping[str, np.ndarray], dtype: str) -> State:
    """Return float32 tensors in the dtype in which an engine of ``dtype`` serves each."""
    return {
        name: to_bfloat16(array) if dtype_of(name, dtype) == "bfloat16" else array for name, array in tensors.items()
    }


def widened(array: np.ndarray) -> np.ndarray:
    """Return a tensor of a state as float32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def over_all_of(state: State) -> str:
    return over_all({name: fingerprint(array) for name, array in state.items()})


def checksums_of(state: State) -> dict[str, str]:
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in state.items()}


def changed(state: State, rng: np.random.Generator, share: float, names: Iterable[str] | None = None) -> State:
    """Return the state with about ``share`` of the values of ``names`` (default: all) changed, by 1 to 40 %."""
    new = dict(state)
    for name in state if names is None else names:
        array = state[name].copy()
        flat = array.reshape(-1)
        index = np.flatnonzero(rng.random(flat.size) < share)
        moved = (widened(flat[index]) * rng.uniform(0.6, 1.4, index.size)).astype(np.float32)
        flat[index] = to_bfloat16(moved) if flat.dtype == np.uint16 else moved
        new[name] = array
    return new


def payload(encoding: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the payload that changes the tensor ``old`` to ``new``."""
    was, now = (np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}") for array in (old, new))
    if encoding == "overwrite":
        index = np.flatnonzero(was != now)
        return delta_format.overwrite(index, now[index])
    assert encoding == "dense", encoding
    return now.view(np.uint8)


def write_delta(
    path: Path, old: State, new: State, encoding: str = "overwrite", compression: str = "none", all_names: bool = False
) -> tuple[FileSource, PartFormat]:
    """Write the tensors that differ, or all of ``new``, to a file. Returns the arguments of ``Staging.add``."""
    names = [name for name in new if all_names or new[name].tobytes() != old[name].tobytes()]
    form = PartFormat(encoding, compression, {name: fingerprint(new[name]).hex for name in names})
    if form.is_plain:
        parts = {name: new[name] for name in names}
    else:
        parts = {name: payload(encoding, old[name], new[name]) for name in names}
        if compression == "zstd":
            parts = {name: delta_format.compress(one) for name, one in parts.items()}
    write_safetensors(path, parts)
    return FileSource(str(path)), form
