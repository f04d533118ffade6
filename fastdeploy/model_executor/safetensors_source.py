"""Tensors in safetensors layout, from a checkpoint folder, one file, or POSIX shared memory, behind one reader.

Every byte is read once, with plain ``pread`` into memory of our own, and what is checked is that copy: nothing is
mapped, so whoever writes the source may overwrite, cut or delete it at any time. Pickles (.bin, .pt) are never opened.

Format: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
Everything that can be wrong is a WeightUpdateRefused whose ``detail`` names the ``file`` or the ``tensor``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdeploy.errors import WeightUpdateRefused
from fastdeploy.inter_communicator.messages import FileSource, FolderSource, SharedMemorySource, Source

INDEX, SINGLE, CHECKSUMS = "model.safetensors.index.json", "model.safetensors", "checksums.json"
SHARED_MEMORY = Path("/dev/shm")  # where shm_open keeps its segments
MAX_HEADER_BYTES = 100_000_000
# bfloat16 travels as its bits; numpy has no such type
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


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


def open_source(source: Source) -> SafetensorsReader:
    """Open whatever the source names and check its headers. To be used as a context manager."""
    reader = SafetensorsReader()
    try:
        match source:
            case FolderSource():
                _open_folder(reader, Path(source.path))
            case FileSource():
                reader.open_file(Path(source.path))
            case SharedMemorySource():
                _open_shared_memory(reader, source)
    except BaseException:
        reader.close()
        raise
    return reader


class SafetensorsReader:
    """The tensors of one or more safetensors files, which stay open until it is closed: a folder may be deleted
    meanwhile."""

    def __init__(self) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self._fds: list[int] = []

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a surplus name, a wrong shape, a type that is no float."""
        for name, entry in self.entries.items():
            if name not in expected:
                raise refuse_tensor(name, f"in {entry.file} is not a tensor of this model")
            if entry.dtype not in DTYPES:
                raise refuse_tensor(name, f"has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}")
            if entry.shape != tuple(expected[name]):
                raise refuse_tensor(name, f"has shape {list(entry.shape)}, expected {list(expected[name])}")

    def read(self, name: str, checksum: str | None = None) -> np.ndarray:
        """A copy of the tensor: float32, or bfloat16 as uint16 bits; float16 is widened to float32. Refused if its
        bytes have another sha256 than ``checksum`` (hex), or if it holds a NaN or an infinity: a policy that diverged
        must not replace one that serves."""
        entry = self.entries[name]
        array = np.empty(entry.shape, DTYPES[entry.dtype])
        buffer = memoryview(array.reshape(-1)).cast("B")
        _pread_into(entry, buffer, name)
        if checksum is not None and hashlib.sha256(buffer).hexdigest() != checksum.lower():
            raise refuse_tensor(name, f"of {entry.file} does not have the sha256 {checksum}")
        array = array.astype(np.float32) if entry.dtype == "F16" else array
        if not _all_finite(array.reshape(-1)):
            raise refuse_tensor(name, f"of {entry.file} holds values that are not finite")
        return array

    def open_file(self, path: Path, limit: int = 0) -> None:
        """Open one more file and take its header in. limit: look at so many bytes only (0 = all)."""
        file = path.name
        fd = self._open_regular(path)
        size = os.fstat(fd).st_size
        if limit > size:
            raise refuse_file(file, f"is cut short: it has {size} bytes, expected {limit}")
        size = limit or size
        head = os.pread(fd, 8, 0)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise refuse_file(file, f"is cut short: {size} bytes cannot hold the header")
        try:
            header = json.loads(os.pread(fd, length, 8), object_pairs_hook=_without_duplicates)
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

    def _open_regular(self, path: Path) -> int:
        try:  # O_NONBLOCK: opening a pipe would otherwise wait for its writer
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise refuse_file(path.name, f"cannot be opened: {error.strerror}") from error
        self._fds.append(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise refuse_file(path.name, "is not a regular file")
        return fd


def _open_folder(reader: SafetensorsReader, folder: Path) -> None:
    if not folder.is_dir():
        raise refuse_file(str(folder), "is not a folder")
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise refuse_file(str(folder), f"has neither {SINGLE} nor {INDEX} (pickled weights are never read)")
        reader.open_file(folder / SINGLE)
        return
    try:
        weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse_file(INDEX, f"has no readable weight_map: {error!r}") from error
    for file in files:
        if not isinstance(file, str) or file != os.path.basename(file):
            raise refuse_file(INDEX, f"expected plain file names in weight_map, got {file!r}")
        reader.open_file(folder / file)
    for name, file in weight_map.items():
        if name not in reader.entries or reader.entries[name].file != file:
            raise refuse_tensor(name, f"is not in {file}, where {INDEX} says it is")


def _open_shared_memory(reader: SafetensorsReader, source: SharedMemorySource) -> None:
    """Nothing is unlinked and no resource tracker hears of it: the segment stays the trainer's."""
    name = source.name.removeprefix("/")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise refuse_file(source.name, "is not the name of a shared memory segment")
    reader.open_file(SHARED_MEMORY / name, source.nbytes)


def read_checksums(folder: str) -> dict[str, str]:
    """A folder's checksums.json: {tensor: sha256 hex}."""
    try:
        table = json.loads((Path(folder) / CHECKSUMS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse_file(CHECKSUMS, f"cannot be read: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise refuse_file(CHECKSUMS, "expected an object of tensor names and sha256 in hex")
    return table


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice")
    return value


def _parse_entry(name: str, value: Any, fd: int, file: str, base: int) -> TensorEntry:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        first, last = value["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, first, last))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed or last < first:
        raise refuse_tensor(name, f"has a broken entry in the header of {file}")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != last - first:
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
