"""A checkpoint folder of safetensors, read with plain ``pread``: nothing is mapped, and nothing of the folder is needed
once its ``Checkpoint`` is closed. Pickles (.bin, .pt) are never opened.

Format: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
Everything that can be wrong is a WeightUpdateRefused whose ``detail`` names the ``file`` or the ``tensor``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.errors import WeightUpdateRefused

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
# bfloat16 travels as its bits; numpy has no such type
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class TensorEntry(NamedTuple):
    """Where one tensor lies: ``offset`` counts from the start of the file."""

    fd: int
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def refuse_file(file: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"{file}: {why}", file=file)


def refuse_tensor(name: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"tensor {name}: {why}", tensor=name)


class Checkpoint:
    """The tensors of a folder, single or sharded. Opening reads and checks every header; ``read`` copies one tensor.

    A context manager: the files stay open until it exits, so a folder deleted meanwhile does not matter.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._fds: list[int] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def check(self, expected: Mapping[str, tuple[int, ...]], tolerated: frozenset[str] = frozenset()) -> None:
        """Refuse a missing or surplus name, a wrong shape, a type that is no float. ``tolerated`` ones may be there."""
        for name in expected:
            if name not in self.entries:
                raise refuse_tensor(name, f"is missing from {self.folder}")
        for name, entry in self.entries.items():
            if name not in expected and name not in tolerated:
                raise refuse_tensor(name, f"in {entry.file} is not a tensor of this model")
            if entry.dtype not in _DTYPES:
                raise refuse_tensor(name, f"has dtype {entry.dtype}, expected one of {', '.join(_DTYPES)}")
            if name in expected and entry.shape != tuple(expected[name]):
                raise refuse_tensor(name, f"has shape {list(entry.shape)}, expected {list(expected[name])}")

    def read(self, name: str) -> np.ndarray:
        """A copy of the tensor: float32, or bfloat16 as uint16 bits; float16 is widened to float32. One that holds a
        NaN or an infinity is refused: a policy that diverged must not replace one that serves."""
        entry = self.entries[name]
        array = np.empty(entry.shape, _DTYPES[entry.dtype])
        _pread_into(entry, memoryview(array.reshape(-1)).cast("B"), name)
        array = array.astype(np.float32) if entry.dtype == "F16" else array
        if not _all_finite(array.reshape(-1)):
            raise refuse_tensor(name, f"of {entry.file} holds values that are not finite")
        return array

    def read_float32(self, name: str) -> np.ndarray:
        """A copy of the tensor as float32; for norms and biases."""
        array = self.read(name)
        return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array

    def read_parts(self, names: list[str]) -> list[np.ndarray]:
        """Tensors that are packed as one; widened to float32 where their types differ."""
        same = len({self.entries[name].dtype for name in names}) == 1
        return [self.read(name) if same else self.read_float32(name) for name in names]

    def _open(self) -> None:
        if not self.folder.is_dir():
            raise refuse_file(str(self.folder), "is not a folder")
        if (self.folder / INDEX).exists():
            self._open_sharded()
        elif (self.folder / SINGLE).exists():
            self._open_file(SINGLE)
        else:
            raise refuse_file(str(self.folder), f"has neither {SINGLE} nor {INDEX} (pickled weights are never read)")

    def _open_sharded(self) -> None:
        try:
            weight_map = json.loads((self.folder / INDEX).read_bytes())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise refuse_file(INDEX, f"has no readable weight_map: {error!r}") from error
        for file in files:
            if not isinstance(file, str) or file != os.path.basename(file):
                raise refuse_file(INDEX, f"expected plain file names in weight_map, got {file!r}")
            self._open_file(file)
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file != file:
                raise refuse_tensor(name, f"is not in {file}, where {INDEX} says it is")

    def _open_file(self, file: str) -> None:
        try:
            fd = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise refuse_file(file, f"cannot be opened: {error.strerror}") from error
        self._fds.append(fd)
        size = os.fstat(fd).st_size
        head = os.pread(fd, 8, 0)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise refuse_file(file, f"is cut short: {size} bytes cannot hold the header")
        try:
            header = json.loads(os.pread(fd, length, 8))
        except (ValueError, RecursionError) as error:
            raise refuse_file(file, f"has a broken header: {error}") from error
        if not isinstance(header, dict):
            raise refuse_file(file, "has a broken header: not a JSON object")
        header.pop("__metadata__", None)
        end = 0
        for name, value in header.items():
            if name in self.entries:
                raise refuse_tensor(name, f"is both in {self.entries[name].file} and in {file}")
            entry = self.entries[name] = _parse_entry(name, value, fd, file, 8 + length)
            end = max(end, entry.offset + entry.nbytes)
        if end > size or (header and end < size):
            raise refuse_file(file, f"has {size} bytes, its header describes {end}: cut short or overwritten")


def _parse_entry(name: str, value: Any, fd: int, file: str, base: int) -> TensorEntry:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        first, last = value["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, first, last))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed or last < first:
        raise refuse_tensor(name, f"has a broken entry in the header of {file}")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != last - first:
        raise refuse_tensor(name, f"of {file}: {last - first} bytes do not make {dtype} of shape {list(shape)}")
    return TensorEntry(fd, file, dtype, shape, base + first, last - first)


def _all_finite(values: np.ndarray) -> bool:
    """values: float32, or bfloat16 as uint16 bits, whose exponent is all ones in what is not finite. In pieces, so that
    a large tensor needs no second copy."""
    piece = 1 << 20
    if values.dtype == np.uint16:
        return all((values[i : i + piece] & 0x7FFF).max() < 0x7F80 for i in range(0, values.size, piece))
    return all(np.isfinite(values[i : i + piece]).all() for i in range(0, values.size, piece))


def _pread_into(entry: TensorEntry, buffer: memoryview, name: str) -> None:
    done = 0
    while done < entry.nbytes:
        try:
            count = os.preadv(entry.fd, [buffer[done : done + (1 << 30)]], entry.offset + done)
        except OSError as error:
            raise refuse_tensor(name, f"cannot be read from {entry.file}: {error.strerror}") from error
        if count == 0:
            raise refuse_tensor(name, f"is cut short: {entry.file} ended while it was read")
        done += count
