"""A file that names the requests with retain_s, for the next engine of this server.

An engine that dies takes its results along. The next engine reads the file, and knows for which requests a client may
still come back. Such a client is told that the result is lost, and gets no other answer under the same id. The file is
a log of records of fixed size, and is written anew when it has grown.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from fastdeploy.core.errors import ResultLost
from fastdeploy.core.request_fields import AddRequest

log = logging.getLogger("fastdeploy.engine")
RECORD = struct.Struct("<16sdd")  # key, retain_s, until
MIN_RECORDS = 4096  # in a file that is written anew


class Entry(NamedTuple):
    """retain_s: of the request; 0 = its result was dropped. until: time.time() up to which its result is kept; 0 = the
    request runs."""

    retain_s: float
    until: float


class RetainedLog:
    """The retained requests of this engine, and those of dead engines whose results are lost. A result is lost for as
    long as it would have been kept. A request that ran counts as if it had ended when this engine started.

    path: of the file; "" = none, for an engine that has no successor. clock: time.time, or that of a test.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time):
        self._path, self._clock = path, clock
        self._entries: dict[bytes, Entry] = {}
        self._lost: dict[bytes, Entry] = {}
        self._file: BinaryIO | None = None
        self._num_records = 0
        if path:
            now = clock()
            found = {key: Entry(e.retain_s, e.until or now + e.retain_s) for key, e in _read(path).items()}
            self._lost = {key: entry for key, entry in found.items() if entry.until > now}
            self._write_anew()

    def check(self, add: AddRequest) -> None:
        """Raise ResultLost if ``add`` asks for the result of an engine that has died."""
        entry = self._lost.get(_key(add)) if add.retain_s > 0 and self._lost else None
        if entry is not None and entry.until > self._clock():
            why = "the engine that had this result has died; send the request with another request_id"
            raise ResultLost(f"request_id {(add.group or add.request_id)!r}: {why}", param="request_id")

    def began(self, add: AddRequest) -> None:
        """Note a request that this engine has accepted."""
        self._note(add, Entry(add.retain_s, 0.0))

    def ended(self, add: AddRequest) -> None:
        """Note that the result is complete."""
        self._note(add, Entry(add.retain_s, self._clock() + add.retain_s))

    def dropped(self, add: AddRequest) -> None:
        """Note that the result is not kept any more."""
        self._note(add, Entry(0.0, 0.0))

    def forget_lost(self) -> None:
        """Forget the lost results: their ids may be used again."""
        self._lost.clear()
        self._write_anew()

    def _note(self, add: AddRequest, entry: Entry) -> None:
        if not self._path:
            return
        key = _key(add)
        if entry.retain_s:
            self._entries[key] = entry
        else:
            self._entries.pop(key, None)
        if self._num_records > 4 * max(len(self._entries), MIN_RECORDS):
            self._write_anew()
            return
        try:
            self._append([(key, entry)])
        except OSError as error:
            self._give_up(error)

    def _write_anew(self) -> None:
        """Replace the file by one with the entries of now."""
        if not self._path:
            return
        now = self._clock()
        self._lost = {key: entry for key, entry in self._lost.items() if entry.until > now}
        try:
            if self._file is not None:
                self._file.close()
            self._file = open(self._path + ".new", "wb", buffering=0)  # noqa: SIM115  stays open
            self._num_records = 0
            self._append([*self._lost.items(), *self._entries.items()])
            os.replace(self._path + ".new", self._path)
        except OSError as error:
            self._give_up(error)

    def _append(self, entries: list[tuple[bytes, Entry]]) -> None:
        assert self._file is not None
        self._file.write(b"".join(RECORD.pack(key, *entry) for key, entry in entries))
        self._num_records += len(entries)

    def _give_up(self, error: OSError) -> None:
        log.error("retained requests cannot be noted, so a restarted engine will not know them: %s", error)
        self._path = ""
        if self._file is not None:
            self._file.close()


def _key(add: AddRequest) -> bytes:
    return hashlib.sha256(f"{add.request_id}\0{add.fingerprint}".encode("utf-8", "surrogatepass")).digest()[:16]


def _read(path: str) -> dict[bytes, Entry]:
    """Return the last entry of each request in the file. A record that was cut off by the engine's death is ignored."""
    raw = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        raw = file.read()
    entries = {key: Entry(*rest) for key, *rest in RECORD.iter_unpack(raw[: len(raw) // RECORD.size * RECORD.size])}
    return {key: entry for key, entry in entries.items() if entry.retain_s}
