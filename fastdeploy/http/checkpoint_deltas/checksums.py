"""Checksums of tensors, by the names that slime and SkyRL give them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import blake3
import xxhash


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


ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
    "adler32": Adler32,
    "sha256": hashlib.sha256,
}
