"""Encoding of a trainer's tensors as safetensors: in memory, in shared memory, or in a folder. No HTTP here.

Paddle and torch are not imported unless the trainer's tensors are of that framework.

Layout (https://github.com/huggingface/safetensors): length of the header in 8 bytes, little endian; the header, JSON
padded with spaces to 8 bytes; the bytes of the tensors.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import SHARED_MEMORY, new_file, new_locked_file, remove_abandoned, write_all

SHM = Path(SHARED_MEMORY)
SEGMENT_PREFIX = "fastdeploy-weights-"
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
    """A tensor in host memory. dtype: as safetensors spells it. data: the bytes in row-major order, valid until the
    trainer changes the tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def host_tensors(state: Mapping[str, Any]) -> dict[str, HostTensor]:
    """Return the tensors of ``state`` (Paddle, torch or numpy, on any device). Row-major tensors in host memory are not
    copied. Raises InvalidField for a value that is no tensor."""
    return {name: _host_tensor(name, value) for name, value in state.items()}


def _host_tensor(name: str, value: Any) -> HostTensor:
    framework = type(value).__module__.partition(".")[0]
    if isinstance(value, np.ndarray | np.generic):
        array, dtype = np.asarray(value), str(value.dtype)
    elif hasattr(value, "detach") and hasattr(value, "dtype"):
        dtype = str(value.dtype).rpartition(".")[2]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor, sharded over a device mesh
        flat = whole.detach().cpu().contiguous().reshape([-1])
        # numpy has no bfloat16. Paddle converts bfloat16 to uint16; torch needs a view as bytes.
        array = flat.numpy() if framework == "paddle" else _torch_bytes(flat)
    else:
        raise InvalidField(name, f"expected a tensor of Paddle, torch or numpy, got {type(value).__name__}")
    if dtype not in DTYPES:
        raise InvalidField(name, f"expected one of {', '.join(DTYPES)}, got {dtype}")
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return HostTensor(DTYPES[dtype], tuple(map(int, value.shape)), memoryview(data))


def _torch_bytes(flat: Any) -> np.ndarray:
    import torch

    return flat.view(torch.uint8).numpy()


def split(tensors: Mapping[str, HostTensor], max_bytes: int) -> Iterator[dict[str, HostTensor]]:
    """Yield ``tensors``, in their order, in parts of at most ``max_bytes``. A larger tensor is a part of its own."""
    part: dict[str, HostTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.data.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.data.nbytes
    if part:
        yield part


def pieces(tensors: Mapping[str, HostTensor]) -> Iterator[bytes | memoryview]:
    """Yield the header of a safetensors file, then the bytes of each tensor."""
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


@asynccontextmanager
async def shared_memory(tensors: Mapping[str, HostTensor]) -> AsyncIterator[tuple[str, int]]:
    """Write a POSIX shared memory segment in safetensors layout, on a thread; yield its name and size; delete it on
    exit. The segment is written and not mapped, so that a full /dev/shm raises OSError and sends no SIGBUS. Segments of
    trainers that were killed are removed first, to make room."""
    remove_abandoned(SHM, SEGMENT_PREFIX)
    path = SHM / f"{SEGMENT_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    file = new_locked_file(path, 0o600)  # made before the thread begins: so a cancelled caller deletes it too
    lock = os.dup(file.fileno())  # keeps the lock when the thread closes the file
    try:
        yield path.name, await asyncio.to_thread(_write, file, tensors)
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def write_folder(tensors: Mapping[str, HostTensor], folder: str | os.PathLike[str]) -> None:
    """Write ``folder``/model.safetensors, readable by all users. The folder must exist."""
    _write(new_file(Path(folder) / "model.safetensors", 0o644), tensors)


def _write(file: BinaryIO, tensors: Mapping[str, HostTensor]) -> int:
    """Write a safetensors file, close it, and return its size."""
    with file:
        for piece in pieces(tensors):
            write_all(file, piece)
        return file.tell()
