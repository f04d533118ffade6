"""Reading of tensors in safetensors layout from a checkpoint folder, a file, or POSIX shared memory.

Every byte is read once, with ``pread`` into memory of this process, and the checks use that copy. Nothing is mapped, so
the source may be overwritten, cut or deleted at any time. Pickles (.bin, .pt) are never opened; of .pdparams files the
places of the tensors are read, and nothing is run (pdparams.py).

Format: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data. Every
error is a WeightUpdateRefused whose ``detail`` names the ``file`` or the ``tensor``. Sizes are checked before anything
is read or multiplied. The thread that computes steps cannot run while JSON is parsed, so one fast call splits a header
and its entries are parsed one by one.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.files import ANYWHERE, Folder, open_regular
from fastdeploy.core.pulled_folder import lock_for_reading
from fastdeploy.core.weight_source import MAX_TENSORS, FolderSource, Source
from fastdeploy.model_executor import pdparams
from fastdeploy.model_executor.ops.interface import View

INDEX, SINGLE, CHECKSUMS = "model.safetensors.index.json", "model.safetensors", "checksums.json"
# Paddle's files: those of PaddleFormers, and the snapshots of one rank that FastDeploy's trainers leave.
PDPARAMS, PADDLE_INDEX, PADDLE_SINGLE = ".pdparams", "model_state.pdparams.index.json", "model_state.pdparams"
SNAPSHOT = re.compile(r"model_state\.(?P<origin>tp(?P<rank>\d+)\.\w+|tp0\d+)(?P<part>\.part\d+)?\.pdparams")
# A tensor takes about 140 bytes of a header and 100 of an index.
MAX_HEADER_BYTES = MAX_JSON_BYTES = 4 << 20
MAX_FILES = 512  # all are open at once, and many systems limit a process to 1,024 open files
MAX_ENTRY_BYTES = 4096
VIEW_BYTES = 4 << 20  # of a stored tensor that are in memory at once while a part of it is picked
MAX_RANK = 8
MAX_INT64 = 2**63 - 1
# numpy has no bfloat16: arrays hold its bits.
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_SPLIT, _ENTRY = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(_HeaderEntry)
Parsed = TypeVar("Parsed")


class TensorEntry(NamedTuple):
    """Place of one tensor. offset: in bytes from the start of the file. view: None = the bytes are the values in C
    order; else the tensor is a part of another one, transposed. A vector has one column then."""

    fd: int
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    view: View | None = None


def refuse_file(file: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"{file}: {why}", file=file)


def refuse_tensor(name: str, why: str) -> WeightUpdateRefused:
    return WeightUpdateRefused(f"tensor {name}: {why}", tensor=name)


def open_source(source: Source, roots: Sequence[str] = ANYWHERE) -> SafetensorsReader:
    """Open the folder, file or segment that the source names, and check its headers. The result is a context manager.
    roots: a folder and its files must lie below one of these. A file or a segment of shared memory may not be a
    link."""
    reader = SafetensorsReader()
    try:
        if isinstance(source, FolderSource):
            _open_folder(reader, source.path, roots)
        else:
            _add(reader, source.file, open_regular, source.nbytes)
    except BaseException:
        reader.close()
        raise
    return reader


class SafetensorsReader:
    """The tensors of one or more safetensors files. The files stay open until the reader is closed, so a folder may be
    deleted meanwhile. folder: the folder of the files, if the source is a folder. has_pdparams: there are .pdparams
    files, each a pickle or, as newer versions of Paddle can write it, safetensors."""

    def __init__(self) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.folder: Folder | None = None
        self.has_pdparams = False
        self._fds: list[int] = []

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.pop())
        if self.folder is not None:
            self.folder.close()

    def keep_pulls_out(self, folder: Folder) -> None:
        """Keep pulls from writing into ``folder`` while this reader is open. Raises WeightUpdateRefused if a pull is
        writing into it, or has left it unfinished."""
        try:
            lock = lock_for_reading(folder.path)
        except OSError as error:
            raise refuse_file(folder.path, f"cannot be read: {error.strerror}") from error
        if lock is not None:
            self._fds.append(lock)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise WeightUpdateRefused for a tensor with an unknown name, a wrong shape, or a type that is not a float."""
        for name, entry in self.entries.items():
            if name not in expected:
                raise refuse_tensor(name, f"in {entry.file} is not a tensor of this model")
            if entry.dtype not in DTYPES:
                raise refuse_tensor(name, f"has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}")
            if entry.shape != tuple(expected[name]):
                raise refuse_tensor(name, f"has shape {list(entry.shape)}, expected {list(expected[name])}")

    def read(self, name: str, checksum: str | None = None) -> np.ndarray:
        """Return a copy of the tensor: float32, or bfloat16 as uint16 bits; float16 is widened to float32.

        Raises WeightUpdateRefused if the sha256 of its bytes differs from ``checksum`` (hexadecimal), or if it holds a
        NaN or an infinity: a policy that diverged must not replace one that serves."""
        entry = self.entries[name]
        array = self.read_bytes(name, checksum).view(DTYPES[entry.dtype]).reshape(entry.shape)
        array = array.astype(np.float32) if entry.dtype == "F16" else array
        if not _all_finite(array.reshape(-1)):
            raise refuse_tensor(name, f"of {entry.file} holds values that are not finite")
        return array

    def read_bytes(self, name: str, checksum: str | None = None) -> np.ndarray:
        """Return a copy of the bytes of a tensor of any dtype, as uint8. Raises WeightUpdateRefused if their sha256
        differs from ``checksum`` (hexadecimal)."""
        entry = self.entries[name]
        raw = np.empty(entry.nbytes, np.uint8)
        if entry.view is None:
            _pread_into(entry, raw.data, name)
        else:
            _read_view(entry, entry.view, raw, name)
        if checksum is not None and hashlib.sha256(raw.data).hexdigest() != checksum.lower():
            raise refuse_tensor(name, f"of {entry.file} does not have the sha256 {checksum}")
        return raw

    def add_file(self, file: str, fd: int, limit: int = 0) -> None:
        """Add one more file, which is closed with the reader. file: its name in messages. limit: the number of bytes to
        use (0 = all)."""
        self._fds.append(fd)
        size = os.fstat(fd).st_size
        if not 0 <= limit <= size:
            raise refuse_file(file, f"is cut short: it has {size} bytes, expected {limit}")
        size = limit or size
        head = os.pread(fd, 9, 0)
        in_paddle = self.folder is not None and file.endswith(PDPARAMS)
        self.has_pdparams |= in_paddle
        pickled = in_paddle and pdparams.is_pickle(head)
        if pickled:
            entries = _read_pickle(fd, file)
        else:
            length = header_length(head[:8], size, file)
            entries = read_header(os.pread(fd, length, 8), file, fd)
        if len(self.entries) + len(entries) > MAX_TENSORS:
            raise refuse_file(file, f"has too many tensors: expected at most {MAX_TENSORS} in all")
        for name, entry in entries.items():
            if name in self.entries:
                raise refuse_tensor(name, f"is both in {self.entries[name].file} and in {file}")
            self.entries[name] = entry
        if not pickled:
            check_size(entries, size, file)


def header_length(head: bytes, size: int, file: str) -> int:
    """Return the length of the header of a file that begins with ``head`` (8 bytes) and has ``size`` bytes."""
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        bound = f"{size} bytes cannot hold the header, which has at most {MAX_HEADER_BYTES}"
        raise refuse_file(file, f"is cut short, or is not in safetensors format: {bound}")
    return length


def read_header(raw: bytes, file: str, fd: int = -1) -> dict[str, TensorEntry]:
    """Return the tensors that the header ``raw`` of ``file`` describes. No two of them share bytes."""
    entries = {name: _located(name, entry, fd, file, 8 + len(raw)) for name, entry in _parse_header(raw, file).items()}
    end = 0
    for offset, nbytes, name in sorted((e.offset, e.nbytes, name) for name, e in entries.items() if e.nbytes):
        if offset < end:
            raise refuse_tensor(name, f"of {file} shares bytes with the tensor before it")
        end = offset + nbytes
    return entries


def check_size(entries: Mapping[str, TensorEntry], size: int, file: str) -> None:
    """Raise WeightUpdateRefused unless a file of ``size`` bytes ends with the last of its tensors."""
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=size)
    if end != size:
        raise refuse_file(file, f"has {size} bytes, its header describes {end}: cut short or overwritten")


def read_json(folder: Folder, file: str, kind: type[Parsed]) -> Parsed:
    """Parse the JSON file ``file`` as ``kind``. Raises WeightUpdateRefused."""
    try:
        raw = folder.read(file, MAX_JSON_BYTES)
        if raw.count(b":") > 2 * MAX_TENSORS:
            raise ValueError(f"it has too many names, expected at most {MAX_TENSORS} tensors")
        return msgspec.json.decode(raw, type=kind)
    except OSError as error:
        raise refuse_file(file, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refuse_file(file, f"is not as expected: {error}") from error


def read_checksums(folder: Folder) -> dict[str, str]:
    """Read checksums.json of a folder: {tensor: sha256 in hexadecimal}."""
    return read_json(folder, CHECKSUMS, dict[str, str])


def _open_folder(reader: SafetensorsReader, path: str, roots: Sequence[str]) -> None:
    try:
        folder = reader.folder = Folder(path, roots)
        names = folder.names()
    except OSError as error:
        why = f"model_path: {path!r} cannot be opened as a folder: {error.strerror}"
        raise WeightUpdateRefused(why, file=path, param="model_path") from error
    reader.keep_pulls_out(folder)
    index, files = _weight_files(path, names)
    weight_map = read_json(folder, index, _Index).weight_map if index else {}
    files = sorted(set(weight_map.values())) if index else files
    if len(files) > MAX_FILES:
        raise refuse_file(index or path, f"names {len(files)} files, expected at most {MAX_FILES}")
    for file in files:
        if file != os.path.basename(file):
            raise refuse_file(index, f"expected plain file names in weight_map, got {file!r}")
        _add(reader, file, folder.open)
    for name, file in weight_map.items():
        if name not in reader.entries or reader.entries[name].file != file:
            raise refuse_tensor(name, f"is not in {file}, where {index} says it is")


def _weight_files(path: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the index of a folder's weights, "" if it has none, and then the files. names: of the folder. Raises
    WeightUpdateRefused if the folder has none, or has two kinds of weights."""
    snapshots = [found for name in names if (found := SNAPSHOT.fullmatch(name))]
    safetensors = [name for name in (INDEX, SINGLE) if name in names]
    paddle = [name for name in (PADDLE_INDEX, PADDLE_SINGLE) if name in names]
    present = [files for files in (safetensors, paddle, [found[0] for found in snapshots]) if files]
    if len(present) > 1:
        both = " and ".join(files[0] for files in present)
        raise refuse_file(path, f"has {both}: which of them has the weights is unknown")
    if not present:
        raise refuse_file(path, f"has neither {SINGLE} nor {INDEX}, and no {PADDLE_SINGLE} (others are never read)")
    if snapshots:
        return "", _snapshot_files(snapshots)
    first = present[0][0]
    return (first, []) if first in (INDEX, PADDLE_INDEX) else ("", [first])


def _snapshot_files(found: Sequence[re.Match[str]]) -> list[str]:
    """Return the files of the snapshot of a folder: of one rank and one origin, whole or in parts."""
    for one in found:
        if one["rank"] not in (None, "0"):
            raise refuse_file(one[0], "is of a rank of tensor parallelism: only a snapshot of one rank can be read")
    if len(origins := sorted({one["origin"] for one in found})) > 1:
        raise refuse_file(found[0][0], f"is one of several snapshots in this folder: {', '.join(origins)}")
    parts = [one[0] for one in found if one["part"]]
    return parts or [found[0][0]]  # FastDeploy, too, prefers the parts


def _add(reader: SafetensorsReader, path: str, open_file: Callable[[str], int], limit: int = 0) -> None:
    file = os.path.basename(path)
    try:
        fd = open_file(path)
    except OSError as error:
        raise refuse_file(file, f"cannot be opened: {error.strerror}") from error
    reader.add_file(file, fd, limit)


def _parse_header(raw: bytes, file: str) -> dict[str, _HeaderEntry]:
    """Return the entries by name. Counting colons finds a name that appears twice, of which the parser keeps only the
    last. A name with a colon in it is refused too."""
    num_colons = raw.count(b":")  # an entry has three, and its name one
    if num_colons > 4 * MAX_TENSORS:
        raise refuse_file(file, f"has too many tensors: expected at most {MAX_TENSORS}")
    try:
        parts = {name: bytes(part) for name, part in _SPLIT.decode(raw).items()}
        if num_colons != len(parts) + sum(part.count(b":") for part in parts.values()):
            raise ValueError("a name appears twice, or has a colon in it")
        parts.pop("__metadata__", None)
        return {name: _parse_entry(name, part, file) for name, part in parts.items()}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refuse_file(file, f"has a broken header: {error}") from error


def _parse_entry(name: str, part: bytes, file: str) -> _HeaderEntry:
    """Parse one entry of a header, in one short call into C."""
    try:
        if len(part) > MAX_ENTRY_BYTES:
            raise ValueError(f"it has {len(part)} bytes, expected at most {MAX_ENTRY_BYTES}")
        entry = _ENTRY.decode(part)
        if part.count(b":") != 3:
            raise ValueError("a key appears twice")
    except (msgspec.DecodeError, ValueError) as error:
        raise refuse_tensor(name, f"has a broken entry in the header of {file}: {error}") from error
    first, last = entry.data_offsets
    if len(entry.shape) > MAX_RANK or not all(0 <= n <= MAX_INT64 for n in entry.shape):
        expected = f"at most {MAX_RANK} dimensions, each an integer from 0 to 2**63 - 1"
        raise refuse_tensor(name, f"has a broken entry in the header of {file}: shape: expected {expected}")
    if not 0 <= first <= last <= MAX_INT64:
        raise refuse_tensor(name, f"has a broken entry in the header of {file}: data_offsets: expected begin <= end")
    return entry


def _located(name: str, entry: _HeaderEntry, fd: int, file: str, base: int) -> TensorEntry:
    first, last = entry.data_offsets
    dtype, shape = entry.dtype, tuple(entry.shape)
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != last - first:
        raise refuse_tensor(name, f"of {file}: {last - first} bytes do not make {dtype} of shape {list(shape)}")
    return TensorEntry(fd, file, dtype, shape, base + first, last - first)


def _read_pickle(fd: int, file: str) -> dict[str, TensorEntry]:
    try:
        found = pdparams.read_arrays(fd)
    except OSError as error:
        raise refuse_file(file, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise refuse_file(file, f"is refused: {error}") from error
    return {name: TensorEntry(fd, file, *array) for name, array in found.items()}


def _all_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite: float32, or bfloat16 as uint16 bits, where the exponent of a value that is
    not finite is all ones. Works in pieces, so that a large tensor needs no second copy."""
    piece = 1 << 20
    if values.dtype == np.uint16:
        return all((values[i : i + piece] & 0x7FFF).max() < 0x7F80 for i in range(0, values.size, piece))
    return all(np.isfinite(values[i : i + piece]).all() for i in range(0, values.size, piece))


def _read_view(entry: TensorEntry, view: View, raw: np.ndarray, name: str) -> None:
    """Read the values of a view to ``raw``, uint8, in C order: some rows of the stored tensor at a time."""
    size, rows = DTYPES[entry.dtype].itemsize, entry.shape[0]
    columns = raw.size // size // rows
    values = raw.view(DTYPES[entry.dtype]).reshape(rows // view.run, view.run, columns)
    length = (rows // view.run - 1) * view.step + view.run  # of the part of a stored row that has all values
    count = max(1, VIEW_BYTES // (view.stride * size))
    for first in range(0, columns, count):
        last = min(first + count, columns)
        piece = np.empty(((last - first - 1) * view.stride + length) * size, np.uint8)
        _pread_into(entry, piece.data, name, first * view.stride * size)
        strides = (view.step * size, size, view.stride * size)
        shape = (rows // view.run, view.run, last - first)
        found = piece.view(DTYPES[entry.dtype])
        values[:, :, first:last] = np.lib.stride_tricks.as_strided(found, shape, strides, writeable=False)


def _pread_into(entry: TensorEntry, buffer: memoryview, name: str, start: int = 0) -> None:
    """Fill ``buffer`` from the byte ``start`` of a tensor on."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(entry.fd, [buffer[done : done + (1 << 30)]], entry.offset + start + done)
        except OSError as error:
            raise refuse_tensor(name, f"cannot be read from {entry.file}: {error.strerror}") from error
        if count == 0:
            raise refuse_tensor(name, f"is cut short: {entry.file} ended while it was read")
        done += count
