"""Reading of one part of an update: the checks of its headers, its plain tensors, and the payloads of a delta.

A plain tensor goes straight into packed weights, in one pass over its bytes. A payload (core/delta_format.py) is read
to memory first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TypeAlias, TypeVar

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import Folder
from fastdeploy.core.fingerprint import Fingerprint
from fastdeploy.core.serving_dtype import dtype_of
from fastdeploy.core.weight_source import PartFormat
from fastdeploy.model_executor.model_config import ModelConfig
from fastdeploy.model_executor.models import CONFIG, GENERATION, read_config, read_eos_token_ids
from fastdeploy.model_executor.ops.interface import Ops, Problem, Region, StageItem, StageResult
from fastdeploy.model_executor.safetensors_source import SafetensorsReader, TensorEntry, read_checksums, refuse_tensor

ShowBytes: TypeAlias = Callable[[int, int], None]
Item = TypeVar("Item")
PIECE_BYTES = 256 << 20  # that are read between two calls of ShowBytes
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}  # serving dtype: its name in safetensors, bytes of a value


# ---------------------------------------------------------------------- checks before any tensor is read


def check_config(folder: Folder, serving: ModelConfig, required: bool) -> None:
    """Raise WeightUpdateRefused if the folder's config describes another model, or is malformed. required: the folder
    must have a config."""
    if not required and not _has(folder, CONFIG):
        return
    try:
        config = read_config(folder)
    except InvalidField as error:
        raise _refused_field(error, CONFIG) from error
    key = serving.first_difference(config)
    if key is not None:
        old, new = map(attrgetter(key), (serving, config))
        raise WeightUpdateRefused(f"{CONFIG}: {key} is {new!r}, the serving model has {old!r}", key=key)


def eos_token_ids(folder: Folder) -> tuple[int, ...] | None:
    """Return the EOS ids that the folder's generation_config.json names; None = it names none, or is not there. Raises
    WeightUpdateRefused."""
    if not _has(folder, GENERATION):
        return None
    try:
        return read_eos_token_ids(folder)
    except InvalidField as error:
        raise _refused_field(error, GENERATION) from error


def expected_checksums(reader: SafetensorsReader, given: Mapping[str, str], verify: bool) -> dict[str, str]:
    """Return the sha256 that each tensor of the source must have, where one is known. Raises WeightUpdateRefused if
    one is missing and ``verify`` is set."""
    expected = dict(given)
    for name in given:
        if name not in reader.entries:
            raise refuse_tensor(name, "has a checksum, but is not in the source")
    if verify and reader.folder is not None:
        for name, checksum in read_checksums(reader.folder).items():
            if expected.setdefault(name, checksum).lower() != checksum.lower():
                raise refuse_tensor(name, f"has another sha256 in checksums.json than in the call: {checksum}")
    for name in reader.entries:
        if verify and name not in expected:
            raise refuse_tensor(name, "has no checksum, but verify_checksum asks for one of every tensor")
    return expected


def check_given_up(stop: np.ndarray) -> None:
    """Raise WeightUpdateRefused if ``stop`` was set."""
    if stop[0]:
        raise WeightUpdateRefused("this update was given up while it was read")


def _refused_field(error: InvalidField, file: str) -> WeightUpdateRefused:
    where = "" if error.field.endswith(".json") else f"{file}: "
    return WeightUpdateRefused(where + error.message, key=error.field)


def _has(folder: Folder, name: str) -> bool:
    try:
        return folder.has(name)
    except OSError as error:
        raise WeightUpdateRefused(f"{name}: cannot be accessed: {error.strerror}", file=name) from error


# ---------------------------------------------------------------------- plain tensors


def stage_tensors(
    ops: Ops,
    reader: SafetensorsReader,
    regions: Mapping[str, Region],
    checksums: Mapping[str, str],
    stop: np.ndarray,
    show: ShowBytes | None = None,
) -> dict[str, Fingerprint]:
    """Read each tensor of ``regions`` to its region, and return the fingerprints. checksums: the sha256 of the bytes of
    some tensors; such a tensor, and a vector that is a part of another one, is read to private memory, hashed, and
    staged from there, one at a time. stop: see ``Ops.stage``. show: called with the bytes that were read, and all of
    them; None = read in one piece. Raises WeightUpdateRefused, which names the tensor and the file."""
    entries = reader.entries
    direct = {
        name: StageItem(region, entries[name].dtype, entries[name].offset, entries[name].fd, view=entries[name].view)
        for name, region in regions.items()
        if name not in checksums and (entries[name].view is None or region.linear is not None)
    }
    found: dict[str, Fingerprint] = {}
    for piece in [direct] if show is None else _pieces(direct, reader, show):
        found |= stage_items(ops, reader, piece, stop)
    for name, region in regions.items():
        if name not in direct:
            check_given_up(stop)
            memory = reader.read_bytes(name, checksums.get(name))
            item = StageItem(region, entries[name].dtype, 0, memory=memory)
            found |= stage_items(ops, reader, {name: item}, stop)
    return found


def _pieces(
    items: Mapping[str, StageItem], reader: SafetensorsReader, show: ShowBytes
) -> Iterator[dict[str, StageItem]]:
    """Yield all items in pieces of at least PIECE_BYTES bytes in the source, but for the last one."""
    total, done, nbytes = sum(reader.entries[name].nbytes for name in items), 0, 0
    piece: dict[str, StageItem] = {}
    show(0, total)
    for name, item in items.items():
        piece[name] = item
        nbytes += reader.entries[name].nbytes
        if nbytes >= PIECE_BYTES:
            yield piece
            done, nbytes, piece = done + nbytes, 0, {}
            show(done, total)
    yield piece
    show(total, total)


def stage_items(
    ops: Ops, reader: SafetensorsReader, items: Mapping[str, StageItem], stop: np.ndarray
) -> dict[str, Fingerprint]:
    """Stage tensors of ``reader`` by name, and return their fingerprints. Raises WeightUpdateRefused."""
    found: dict[str, Fingerprint] = {}
    for dtype, some in by_dtype(items, ops.dtype):
        results = ops.stage(list(some.values()), stop, dtype)
        check_given_up(stop)
        for name, result in zip(some, results, strict=True):
            if result.problem is not None:
                raise refusal(name, reader.entries[name].file, result, dtype)
            found[name] = result.fingerprint
    return found


def by_dtype(items: Mapping[str, Item], dtype: str) -> Iterator[tuple[str, dict[str, Item]]]:
    """Yield each dtype in which tensors are served by an engine of ``dtype``, with its items."""
    for one in dict.fromkeys((dtype, "float32")):
        if some := {name: item for name, item in items.items() if dtype_of(name, dtype) == one}:
            yield one, some


def refusal(name: str, file: str, result: StageResult, dtype: str) -> WeightUpdateRefused:
    """Return the error for values that ``Ops.stage`` refused. file: where they came from. dtype: of the tensor in the
    engine."""
    match result.problem:
        case Problem.NOT_FINITE:
            return refuse_tensor(name, f"of {file} holds values that are not finite")
        case Problem.TOO_LARGE:
            return refuse_tensor(name, f"of {file} has values too large for {dtype}")
        case Problem.CUT_SHORT:
            return refuse_tensor(name, f"is cut short: {file} ended while it was read")
        case Problem.READ_ERROR:
            return refuse_tensor(name, f"cannot be read from {file}: {os.strerror(result.errno)}")
        case Problem.MALFORMED:
            return refuse_tensor(name, f"of {file} is malformed")
        case _:
            return WeightUpdateRefused("this update was given up while it was read")


# ---------------------------------------------------------------------- payloads of a delta


class PayloadReader:
    """The payloads of one source. shapes: of the tensors that may arrive, by name. dtype: the serving dtype.

    The headers are checked when the object is made. Raises WeightUpdateRefused for an unknown name, and for a tensor
    whose type or size is not that of a payload."""

    def __init__(self, reader: SafetensorsReader, shapes: Mapping[str, tuple[int, ...]], form: PartFormat, dtype: str):
        self._reader, self._entries = reader, reader.entries
        self._shapes, self._form, self._dtype = shapes, form, dtype
        for name, entry in reader.entries.items():
            self._check_header(name, entry)

    def batches(self, checksums: Mapping[str, str], nbytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all payloads by name, as ``read`` returns them, in batches of at least ``nbytes`` bytes."""
        batch: dict[str, np.ndarray] = {}
        size = 0
        for name in self._entries:
            batch[name] = payload = self.read(name, checksums.get(name))
            size += payload.nbytes
            if size >= nbytes:
                yield batch
                batch, size = {}, 0
        if batch:
            yield batch

    def read(self, name: str, checksum: str | None) -> np.ndarray:
        """Return a decompressed copy of a payload, as uint8. Raises WeightUpdateRefused if the sha256 of its bytes in
        the source differs from ``checksum`` (hexadecimal), and for a payload of a wrong size, before memory for more
        than the largest payload of the tensor is allocated."""
        raw = self._reader.read_bytes(name, checksum)
        if self._form.compression == "zstd":
            try:
                raw = delta_format.decompress(raw, self._largest(name))
            except ValueError as error:
                raise self._refuse(name, str(error)) from error
            self._check_size(name, raw.nbytes)
        return raw

    def refusal(self, name: str, payload: np.ndarray, result: StageResult) -> WeightUpdateRefused:
        """Return the error for an overwrite that ``Ops.apply_deltas`` refused."""
        if result.problem is Problem.MALFORMED:
            try:
                delta_format.read_overwrite(payload, math.prod(self._shapes[name]), self._width(name))
            except ValueError as error:
                return self._refuse(name, str(error))
        return refusal(name, self._entries[name].file, result, dtype_of(name, self._dtype))

    def _check_header(self, name: str, entry: TensorEntry) -> None:
        form = self._form
        if name not in self._shapes:
            raise refuse_tensor(name, f"in {entry.file} is not a tensor of this model")
        if entry.dtype != "U8" or entry.shape != (entry.nbytes,):
            got = f"has dtype {entry.dtype} and shape {list(entry.shape)}"
            expected = (
                f"with encoding {form.encoding} and compression {form.compression}, expected a payload: U8 [bytes]"
            )
            raise refuse_tensor(name, f"of {entry.file} {got}; {expected}")
        if form.compression == "none":
            self._check_size(name, entry.nbytes)
        elif entry.nbytes > (limit := delta_format.largest_frame(self._largest(name))):
            raise self._refuse(name, f"expected a zstd frame of at most {limit} bytes, got {entry.nbytes}")

    def _check_size(self, name: str, nbytes: int) -> None:
        exact, limit = self._form.encoding == "dense", self._largest(name)
        if nbytes > limit or (exact and nbytes < limit):
            raise self._refuse(name, f"expected {'' if exact else 'at most '}{limit} bytes, got {nbytes}")

    def _largest(self, name: str) -> int:
        size = math.prod(self._shapes[name])
        return delta_format.largest_payload(self._form.encoding, size, self._width(name))

    def _width(self, name: str) -> int:
        """Return the bytes of a value."""
        return DTYPES[dtype_of(name, self._dtype)][1]

    def _refuse(self, name: str, why: str) -> WeightUpdateRefused:
        shape = f"a tensor {list(self._shapes[name])} of {dtype_of(name, self._dtype)}, its serving dtype"
        return refuse_tensor(
            name, f"of {self._entries[name].file} is no {self._form.encoding} payload of {shape}: {why}"
        )
