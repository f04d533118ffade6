"""A safetensors file that is staged while it arrives, in pieces that may end anywhere."""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from fastdeploy.core.files import open_regular
from fastdeploy.core.fingerprint import ZERO, Fingerprint
from fastdeploy.core.weight_source import StreamSource
from fastdeploy.model_executor.ops.interface import Region, StageItem
from fastdeploy.model_executor.safetensors_source import (
    DTYPES,
    MAX_HEADER_BYTES,
    SafetensorsReader,
    TensorEntry,
    check_size,
    header_length,
    read_header,
    refuse_file,
    refuse_tensor,
)

FILE = "upload"  # the file in messages
# Checks the header: raises WeightUpdateRefused unless all tensors may be staged. Returns the sha256 of some of them.
Check: TypeAlias = Callable[[SafetensorsReader], Mapping[str, str]]
RegionOf: TypeAlias = Callable[[str], Region]
# Stages rows of the named tensors, and returns the fingerprint of each item.
Stage: TypeAlias = Callable[[Sequence[tuple[str, StageItem]]], Sequence[Fingerprint]]


@dataclass
class _Tensor:
    """A tensor of the file. row_bytes: of one row; a tensor of one dimension has rows of one value. rows: number of
    those that were staged. carry: the beginning of the next row. sha: of the bytes so far, if the tensor has a
    checksum."""

    name: str
    entry: TensorEntry
    row_bytes: int
    sha: hashlib._Hash | None
    rows: int = 0
    carry: bytearray = field(default_factory=bytearray)
    fingerprint: Fingerprint = ZERO

    @property
    def first(self) -> int:
        """Index of the first value that was not staged."""
        return self.rows * (self.row_bytes // DTYPES[self.entry.dtype].itemsize)

    @property
    def end(self) -> int:
        """Offset of the first byte behind the tensor."""
        return self.entry.offset + self.entry.nbytes


class TensorStream:
    """One upload. After an error it cannot be used any more.

    fingerprints: of the tensors that are complete, by name."""

    def __init__(self, check: Check, region_of: RegionOf, stage: Stage):
        self._check, self._region_of, self._stage = check, region_of, stage
        self._head = bytearray()
        self._received = 0  # bytes
        self._tensors: deque[_Tensor] = deque()  # those that are not complete, in the order of the file
        self._checksums: Mapping[str, str] = {}
        self.reader: SafetensorsReader | None = None  # None: the header is not complete
        self.fingerprints: dict[str, Fingerprint] = {}

    def add(self, source: StreamSource) -> None:
        """Stage all rows that end in this piece. Raises WeightUpdateRefused, or MemoryError."""
        if source.nbytes:
            try:
                fd = open_regular(source.path)
            except OSError as error:
                raise refuse_file(FILE, f"cannot be opened: {error.strerror}") from error
            try:
                self._add(fd, source.offset, source.nbytes)
            finally:
                os.close(fd)
        if source.state == "complete":
            if self.reader is None:
                header_length(bytes(self._head[:8]), self._received, FILE)  # raises, because the header is cut short
            assert self.reader is not None
            check_size(self.reader.entries, self._received, FILE)

    def _add(self, fd: int, offset: int, nbytes: int) -> None:
        end = offset + nbytes
        if self.reader is None:
            offset += self._add_to_head(fd, offset, nbytes)
        self._received += nbytes
        shift = end - self._received  # from an offset in the upload to the offset of the same byte in the file
        items: list[tuple[_Tensor, StageItem]] = []
        complete: list[_Tensor] = []
        while self._tensors and self._tensors[0].entry.offset < self._received:
            tensor = self._tensors[0]
            first, last = max(offset, tensor.entry.offset + shift), min(end, tensor.end + shift)
            items += ((tensor, item) for item in self._cut(tensor, fd, first, last - first))
            if last < tensor.end + shift:
                break
            complete.append(self._tensors.popleft())
        found = self._stage([(tensor.name, item) for tensor, item in items]) if items else []
        for (tensor, _), fingerprint in zip(items, found, strict=True):
            tensor.fingerprint += fingerprint
        for tensor in complete:
            self._complete(tensor)
        if self.reader is not None and not self._tensors:
            self._check_no_more(self.reader)

    def _header_end(self) -> int:
        """Return the offset behind the header, or behind its length if that is not complete."""
        head = bytes(self._head[:8])
        return 8 if len(head) < 8 else 8 + header_length(head, 8 + MAX_HEADER_BYTES, FILE)

    def _add_to_head(self, fd: int, offset: int, nbytes: int) -> int:
        """Take the bytes that belong to the header, and return how many. Read the header once it is complete."""
        taken = 0
        while taken < nbytes and (missing := self._header_end() - len(self._head)):
            part = _pread(fd, min(missing, nbytes - taken), offset + taken)
            self._head += part.data
            taken += part.size
        if len(self._head) >= 8 and len(self._head) == self._header_end():
            self._begin(read_header(bytes(self._head[8:]), FILE))
        return taken

    def _begin(self, entries: Mapping[str, TensorEntry]) -> None:
        reader = SafetensorsReader()
        reader.entries.update(entries)
        self._checksums = self._check(reader)
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            row_bytes = math.prod(entry.shape[1:]) * DTYPES[entry.dtype].itemsize
            sha = hashlib.sha256() if name in self._checksums else None
            self._tensors.append(_Tensor(name, entry, row_bytes, sha))
        self.reader = reader

    def _cut(self, tensor: _Tensor, fd: int, at: int, nbytes: int) -> list[StageItem]:
        """Return the rows that end in the next ``nbytes`` bytes of a tensor. Keep the beginning of the row behind
        them."""
        items = []
        memory: np.ndarray | None = None
        if tensor.sha is not None:  # the bytes that are hashed must be those that are staged
            memory, at, fd = _pread(fd, nbytes, at), 0, -1
            tensor.sha.update(memory.data)

        def read(count: int) -> memoryview:
            return (_pread(fd, count, at) if memory is None else memory[at : at + count]).data

        if tensor.carry:
            count = min(nbytes, tensor.row_bytes - len(tensor.carry))
            tensor.carry += read(count)
            at, nbytes = at + count, nbytes - count
            if len(tensor.carry) == tensor.row_bytes:
                items.append(self._item(tensor, 1, 0, -1, np.frombuffer(bytes(tensor.carry), np.uint8)))
                tensor.carry.clear()
        if rows := nbytes // tensor.row_bytes:
            items.append(self._item(tensor, rows, at, fd, memory))
            at, nbytes = at + rows * tensor.row_bytes, nbytes - rows * tensor.row_bytes
        if nbytes:
            tensor.carry += read(nbytes)
        return items

    def _item(self, tensor: _Tensor, rows: int, offset: int, fd: int, memory: np.ndarray | None) -> StageItem:
        region = _rows_of(self._region_of(tensor.name), tensor.rows, rows)
        item = StageItem(region, tensor.entry.dtype, offset, fd, memory, tensor.first)
        tensor.rows += rows
        return item

    def _complete(self, tensor: _Tensor) -> None:
        expected = self._checksums.get(tensor.name, "")
        if tensor.sha is not None and tensor.sha.hexdigest() != expected.lower():
            raise refuse_tensor(tensor.name, f"of {FILE} does not have the sha256 {expected}")
        self.fingerprints[tensor.name] = tensor.fingerprint

    def _check_no_more(self, reader: SafetensorsReader) -> None:
        end = max((entry.offset + entry.nbytes for entry in reader.entries.values()), default=self._received)
        if self._received > end:
            raise refuse_file(FILE, f"has more than the {end} bytes that its header describes")


def _rows_of(region: Region, first: int, rows: int) -> Region:
    """Return rows [first, first + rows) of the region of a whole tensor. The values of a vector count as rows."""
    if region.vector is not None:
        return Region(1, rows, vector=region.vector[first : first + rows])
    return region._replace(rows=rows, first_row=region.first_row + first)


def _pread(fd: int, nbytes: int, offset: int) -> np.ndarray:
    buffer = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        try:
            count = os.preadv(fd, [buffer.data[done:]], offset + done)
        except OSError as error:
            raise refuse_file(FILE, f"cannot be read: {error.strerror}") from error
        if count == 0:
            raise refuse_file(FILE, "is cut short: the file ended while it was read")
        done += count
    return buffer
