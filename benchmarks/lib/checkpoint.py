"""A checkpoint of one safetensors file in a trainer's memory, and deltas of it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy.core import delta_format
from fastdeploy.core.files import SHARED_MEMORY, new_file, write_all
from fastdeploy.core.fingerprint import change, fingerprint, over_all
from fastdeploy.core.serving_dtype import in_dtype
from fastdeploy.testing.tensors import WEIGHTS, Entry, entries, head

BATCH_BYTES = 4 << 20
KINDS: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<u4")}


class Checkpoint:
    """folder: contains one model.safetensors, of bfloat16 or float32 tensors."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def data(self) -> bytes:
        """The file."""
        return (self.folder / WEIGHTS).read_bytes()

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return (self.folder / WEIGHTS).stat().st_size

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and bits of each tensor, flat."""
        for entry in entries(self.data):
            kind = KINDS[entry.dtype]
            yield entry.name, np.frombuffer(self.data, kind, (entry.end - entry.start) // kind.itemsize, entry.start)

    def parts(self, nbytes: int) -> Iterator[tuple[bytes, memoryview]]:
        """Yield safetensors files that have all tensors together: head and data of each. Each has at most ``nbytes``
        bytes of data, unless it is one larger tensor."""
        group: list[Entry] = []
        for entry in sorted(entries(self.data), key=lambda entry: entry.start):
            if group and entry.end - group[0].start > nbytes:
                yield self._part(group)
                group = []
            group.append(entry)
        if group:
            yield self._part(group)

    def _part(self, group: Sequence[Entry]) -> tuple[bytes, memoryview]:
        start, end = group[0].start, group[-1].end
        header = head((entry.name, entry.dtype, entry.shape, entry.end - entry.start) for entry in group)
        return header, memoryview(self.data)[start:end]

    def read_file(self) -> None:
        """Bring the file into the page cache."""
        with open(self.folder / WEIGHTS, "rb", buffering=0) as file:
            while file.read(BATCH_BYTES):
                pass

    def drop_file(self) -> None:
        """Remove the file from the page cache."""
        with open(self.folder / WEIGHTS, "rb") as file:
            os.fsync(file.fileno())  # only clean pages can be removed
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @cached_property
    def _segment(self) -> Path:
        path = Path(SHARED_MEMORY) / f"weight-update-{uuid.uuid4().hex}"
        with new_file(path, 0o600) as file:
            write_all(file, self.data)
        return path

    @contextmanager
    def segment(self) -> Iterator[str]:
        """Yield the name of a shared memory segment with the file. It is written at the first call, and removed by
        ``close``."""
        yield self._segment.name

    def load(self, shared: bool) -> None:
        """Read the file, and write the segment if it is ``shared``, so that no later call has to."""
        assert self.data and (not shared or self._segment)

    def close(self) -> None:
        """Remove the segment."""
        if "_segment" in self.__dict__:
            os.unlink(self._segment)
            del self._segment


class Flips:
    """Deltas between a checkpoint and a second state, which has another lowest bit in a ``share`` of all values. Both
    are in bfloat16, as every engine serves them.

    frames: two safetensors files of overwrites: from the checkpoint to the second state, and back. fingerprints: of the
    checkpoint and of the second state."""

    def __init__(self, checkpoint: Checkpoint, share: float, compression: str = "none", seed: int = 0):
        rng = np.random.default_rng(seed)
        payloads: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
        before, after = {}, {}
        for name, stored in checkpoint.tensors():
            bits = in_dtype(stored.view(np.float32) if stored.dtype == np.uint32 else stored, "bfloat16")
            count = rng.binomial(bits.size, share)
            index = np.unique(rng.integers(0, bits.size, count))
            old = bits[index]
            new = old ^ 1
            for found, values in zip(payloads, (new, old), strict=True):
                payload = delta_format.overwrite(index, values)
                found[name] = delta_format.compress(payload) if compression == "zstd" else payload
            before[name] = fingerprint(bits)
            after[name] = before[name] + change(index, old, new)
        self.frames = tuple(encode(found) for found in payloads)
        self.fingerprints = [over_all(before), over_all(after)]


def encode(payloads: dict[str, np.ndarray]) -> bytes:
    """Return a safetensors file of uint8 tensors."""
    header = head((name, "U8", payload.shape, payload.nbytes) for name, payload in payloads.items())
    return b"".join([header, *(payload.tobytes() for payload in payloads.values())])
