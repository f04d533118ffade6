"""A trainer's tensors as safetensors: in memory, in shared memory, or in a folder. No HTTP here, and no framework: a
tensor of Paddle or torch is asked for its bytes, so whichever the trainer uses is the one that is imported.

The layout is that of https://github.com/huggingface/safetensors: the header's length in 8 bytes, little endian; the
header, JSON padded with spaces to 8 bytes; the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.shared_files import SHARED_MEMORY, new_file, write_all

SHM = Path(SHARED_MEMORY)
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class HostTensor(NamedTuple):
    """dtype: as safetensors spells it. data: the bytes in row-major order, valid as long as the tensor is unchanged."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def host_tensors(state: Mapping[str, Any]) -> dict[str, HostTensor]:
    """The tensors of ``state`` (Paddle, torch or numpy, on any device), copied only where they are not in host memory
    in row-major order already. Raises InvalidField for what is no tensor."""
    return {name: _host_tensor(name, value) for name, value in state.items()}


def _host_tensor(name: str, value: Any) -> HostTensor:
    framework = type(value).__module__.partition(".")[0]
    if isinstance(value, np.ndarray | np.generic):
        array, dtype = np.asarray(value), str(value.dtype)
    elif hasattr(value, "detach") and hasattr(value, "dtype"):
        dtype = str(value.dtype).rpartition(".")[2]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # sharded over a mesh
        flat = whole.detach().cpu().contiguous().reshape([-1])
        # numpy has no bfloat16: torch shows the bytes, Paddle gives them as they are
        array = flat.numpy() if framework == "paddle" else _torch_bytes(flat)
    else:
        raise InvalidField(name, f"expected a tensor of Paddle, torch or numpy, got {type(value).__name__}")
    if dtype not in DTYPES:
        raise InvalidField(name, f"expected one of {', '.join(DTYPES)}, got {dtype}")
    data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return HostTensor(DTYPES[dtype], tuple(map(int, value.shape)), data)


def _torch_bytes(flat: Any) -> np.ndarray:
    import torch

    return flat.view(torch.uint8).numpy()


def digests(tensors: Mapping[str, HostTensor]) -> dict[str, str]:
    """sha256 of each tensor's bytes, in hex: what /v1/weights/chunk takes as checksums."""
    return {name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in tensors.items()}


def chunks(tensors: Mapping[str, HostTensor], max_bytes: int) -> Iterator[dict[str, HostTensor]]:
    """``tensors`` in their order, in groups of at most ``max_bytes``; a larger tensor goes alone."""
    group: dict[str, HostTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if group and size + tensor.data.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.data.nbytes
    if group:
        yield group


def pieces(tensors: Mapping[str, HostTensor]) -> Iterator[bytes | memoryview]:
    """One safetensors file, piece by piece."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.data


def encode(tensors: Mapping[str, HostTensor]) -> bytes:
    """One safetensors file, as the body of an upload."""
    return b"".join(pieces(tensors))


@contextmanager
def shared(tensors: Mapping[str, HostTensor]) -> Iterator[tuple[str, int]]:
    """A POSIX shared memory segment in safetensors layout: its name and size. It is gone on exit. Raises OSError where
    there is no room: it is written, not mapped, so that a full /dev/shm is an error and no signal."""
    path = SHM / f"fastdeploy-{uuid.uuid4().hex}"
    try:
        yield path.name, _write(path, tensors, 0o600)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def write_folder(tensors: Mapping[str, HostTensor], folder: str | os.PathLike[str]) -> int:
    """Write ``folder``/model.safetensors, for everybody to read; returns its size. The folder must exist."""
    return _write(Path(folder) / "model.safetensors", tensors, 0o644)


def _write(path: Path, tensors: Mapping[str, HostTensor], mode: int) -> int:
    with new_file(path, mode) as file:
        for piece in pieces(tensors):
            write_all(file, piece)
        return file.tell()
