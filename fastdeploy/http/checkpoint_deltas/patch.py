"""The new bytes of one tensor: the old bytes and one payload of a delta. And their checksum.

A payload is one zstd frame. Positions and changes are of bytes, whatever the dtype of the tensor.

    xor        the bytes of the tensor, xor the old ones
    overwrite  u4 n, u4 positions[n] (ascending), u1 values[n]; little-endian

The formats are those of slime (utils/disk_delta.py) and SkyRL (weight_sync/delta/checkpoint.py; xor alone). A tensor is
read, changed, added to its checksum and written in blocks that stay in the cache of a core.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import blake3
import numpy as np
import xxhash
import zstandard

from fastdeploy.core.delta_format import decompress

BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """A checksum of bytes that are given piece by piece."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class Adler32:
    """Adler-32 (RFC 1950) with the interface of hashlib. 8 hexadecimal digits."""

    def __init__(self) -> None:
        self._value = zlib.adler32(b"")

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


# By the names that slime and SkyRL give them.
ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": Adler32,
    "sha256": hashlib.sha256,
}


class Patch(Protocol):
    """The changes of one tensor."""

    def apply(self, block: np.ndarray, start: int) -> bool:
        """Change the bytes of ``block`` (uint8), which begins at byte ``start`` of the tensor. Blocks come in order.
        Return whether any byte changed. Raises ValueError for a payload that is too short."""
        ...

    def finish(self) -> None:
        """Check that the payload has ended with the tensor. Raises ValueError."""
        ...


class Xor:
    """The bytes of the tensor, xor the old ones. The frame is decompressed as the blocks come."""

    def __init__(self, frame: np.ndarray, nbytes: int):
        self._nbytes = nbytes
        self._reader = zstandard.ZstdDecompressor().stream_reader(frame.data)
        self._scratch = np.empty(min(BLOCK_BYTES, nbytes), np.uint8)

    def apply(self, block: np.ndarray, start: int) -> bool:
        change = self._scratch[: block.size]
        done = 0
        while done < change.size:
            count = self._read(change[done:])
            if count == 0:
                raise ValueError(f"its frame ends after {start + done} of {self._nbytes} bytes")
            done += count
        if not change.any():
            return False
        block ^= change
        return True

    def finish(self) -> None:
        if self._read(np.empty(1, np.uint8)):
            raise ValueError(f"its frame has more than the {self._nbytes} bytes of the tensor")

    def _read(self, into: np.ndarray) -> int:
        try:
            return self._reader.readinto(into.data)
        except zstandard.ZstdError as error:
            raise ValueError(f"its payload is no zstd frame: {error}") from error


class Overwrite:
    """New values at a list of positions. Raises ValueError for a malformed payload."""

    def __init__(self, frame: np.ndarray, nbytes: int):
        payload = decompress(frame, 4 + 5 * nbytes)
        count = int(payload[:4].view("<u4")[0]) if payload.size >= 4 else -1
        if payload.size != 4 + 5 * count:
            raise ValueError(f"its payload of {payload.size} bytes is no list of positions and values")
        self._positions, self._values = payload[4 : 4 + 4 * count].view("<u4"), payload[4 + 4 * count :]
        if count and (self._positions[-1] >= nbytes or (self._positions[1:] <= self._positions[:-1]).any()):
            raise ValueError(f"its positions are not ascending numbers below {nbytes}")

    def apply(self, block: np.ndarray, start: int) -> bool:
        first, last = np.searchsorted(self._positions, (start, start + block.size))
        block[self._positions[first:last] - start] = self._values[first:last]
        return bool(last > first)

    def finish(self) -> None:
        return None


ENCODINGS: dict[str, Callable[[np.ndarray, int], Patch]] = {"xor": Xor, "overwrite": Overwrite}


def patch_bytes(fd: int, offset: int, nbytes: int, patch: Patch, hasher: Hasher, check: Callable[[], None]) -> str:
    """Change the bytes [offset, offset + nbytes) of an open file in place, and return the checksum of the new bytes.
    check: called between blocks, and may raise. Raises ValueError for a wrong payload, and OSError."""
    scratch = np.empty(min(BLOCK_BYTES, nbytes), np.uint8)
    for start in range(0, nbytes, BLOCK_BYTES):
        check()
        block = scratch[: min(BLOCK_BYTES, nbytes - start)]
        if os.preadv(fd, [block.data], offset + start) != block.size:
            raise ValueError("its local file was cut short")
        if patch.apply(block, start) and os.pwrite(fd, block.data, offset + start) != block.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        hasher.update(block.data)
    patch.finish()
    return hasher.hexdigest()
