"""Fingerprints of the weights of earlier checks, in a small file: so a later check can tell that an engine serves the
weights of k checks ago, although the trainer has them no more."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl.check_sync.case import Earlier

KEPT = 32  # checks
DIGITS = 32  # of a fingerprint in hex


class _Entry(msgspec.Struct):
    """One check. fingerprint: over all tensors. digests: of each tensor, one behind the other."""

    fingerprint: str
    digests: str


class _File(msgspec.Struct):
    """dtype, names: of all entries. entries: the latest first."""

    dtype: str
    names: list[str]
    entries: list[_Entry]


class History(NamedTuple):
    """The file of one trainer. path: None = nothing is kept."""

    path: Path | None

    def earlier(self, dtype: str, fingerprint: str) -> list[Earlier]:
        """Return the weights of earlier checks in this dtype, without those of ``fingerprint``, the latest first.
        Raises InvalidField for a file that is none of these."""
        file = self._read()
        if file is None or file.dtype != dtype:
            return []
        entries = [entry for entry in file.entries if entry.fingerprint != fingerprint]
        return [
            Earlier(f"{updates(k)} before", _by_name(file.names, entry)) for k, entry in enumerate(entries, start=1)
        ]

    def add(self, dtype: str, fingerprint: str, digests: Mapping[str, str]) -> None:
        """Add the weights of a check, unless they are those of the last one. Raises OSError."""
        if self.path is None:
            return
        file = self._read()
        names = sorted(digests)
        if file is None or (file.dtype, file.names) != (dtype, names):
            file = _File(dtype, names, [])
        if file.entries and file.entries[0].fingerprint == fingerprint:
            return
        entry = _Entry(fingerprint, "".join(digests[name] for name in names))
        file.entries = [entry, *file.entries][:KEPT]
        written = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        written.write_bytes(msgspec.json.encode(file))
        written.replace(self.path)

    def _read(self) -> _File | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_File)
        except msgspec.DecodeError as error:
            raise InvalidField("history", f"{self.path} is no file of check-sync: {error}") from error


def updates(k: int) -> str:
    """Return "1 update", "2 updates"."""
    return f"{k} update{'s' if k > 1 else ''}"


def _by_name(names: Sequence[str], entry: _Entry) -> dict[str, str]:
    return {name: entry.digests[i * DIGITS : (i + 1) * DIGITS] for i, name in enumerate(names)}
