"""The writing of records beside the event loop, on a thread: keys are removed there, and nothing waits for the disk."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import zstandard

from fastdeploy.traffic.file import AnyRecord, Begin, Body, Closing, End, Head, Opening, Piece, RecordWriter, Side
from fastdeploy.traffic.headers import encoding_of, is_json, is_opaque
from fastdeploy.traffic.keys import KeyRemover

MAX_TEXT_BYTES = 64 << 20  # of a body that is held until it is whole, so that it can be searched for keys
MAX_WAITING_BYTES = 64 << 20  # of records that are not written yet
MAX_OPEN_PIECES = 100


@dataclass
class _Reply:
    """A reply. whole: whether it is searched when it is complete. encoding: its compression. held: what is not written
    yet, because the body is not complete, or because a key may begin at its end."""

    whole: bool
    opaque: bool
    encoding: str
    held: list[Head | Piece] = field(default_factory=list)


class RecordCleaner:
    """The way of each record to the file. Requests, JSON, and compressed replies are searched for keys when they are
    complete; streams and data, piece by piece."""

    def __init__(self) -> None:
        self._remover = KeyRemover()
        self._requests: dict[int, list[Piece] | None] = {}  # None: data, of which nothing is held
        self._replies: dict[int, _Reply] = {}

    def clean(self, record: AnyRecord) -> Iterator[AnyRecord]:
        """Yield what is to be written for a record."""
        if isinstance(record, Opening | Closing):
            yield record
        elif isinstance(record, Begin):
            self._requests[record.id] = None if is_opaque(record.headers) or encoding_of(record.headers) else []
            headers = self._remover.headers(record.headers)
            yield msgspec.structs.replace(record, headers=headers, target=self._remover.target(record.target))
        elif isinstance(record, Head):
            yield from self._head(record)
        elif isinstance(record, End):
            self._requests.pop(record.id, None)
            if (reply := self._replies.pop(record.id, None)) is not None:
                yield from self._flushed(reply, record.id)
            yield msgspec.structs.replace(record, error=self._remover.text(record.error.encode()).decode())
        elif record.side is Side.REQUEST:
            yield from self._request(record)
        elif isinstance(record, Piece):
            yield from self._reply_piece(record)
        else:
            yield from self._flushed(self._replies[record.id], record.id, record.kept)
            yield record

    def _request(self, record: Piece | Body) -> Iterator[AnyRecord]:
        held = self._requests[record.id]
        if isinstance(record, Piece):
            if held is None:
                yield msgspec.structs.replace(record, data=self._remover.known(record.data))
            else:
                held.append(record)
            return
        if held and record.kept:
            body = self._remover.body(_joined(held), side_is_reply=False)
            yield Piece(record.id, record.at, Side.REQUEST, body)
        self._requests[record.id] = []
        yield record

    def _head(self, record: Head) -> Iterator[AnyRecord]:
        head = msgspec.structs.replace(record, headers=self._remover.headers(record.headers))
        encoding = encoding_of(record.headers)
        reply = _Reply(is_json(record.headers) or encoding != "", is_opaque(record.headers), encoding)
        self._replies[record.id] = reply
        if reply.whole:
            reply.held.append(head)
        else:
            yield head

    def _reply_piece(self, record: Piece) -> Iterator[AnyRecord]:
        reply = self._replies[record.id]
        reply.held.append(record)
        if not reply.whole:
            text = _joined(reply.held)
            if len(reply.held) > MAX_OPEN_PIECES or not self._remover.open_end(text):
                yield from self._flushed(reply, record.id)

    def _flushed(self, reply: _Reply, exchange: int, kept: bool = True) -> Iterator[AnyRecord]:
        """Yield what is held, as it is if there is no key in it, else as one piece. kept: whether the body is kept."""
        held, reply.held = reply.held, []
        heads = [record for record in held if isinstance(record, Head)]
        if not kept:
            yield from heads
            return
        text = _decoded(_joined(held), reply.encoding)
        cleaned = self._cleaned(reply, text)
        if cleaned == text:
            yield from held
            return
        for head in heads:
            headers = [(name, value) for name, value in head.headers if name.lower() != "content-encoding"]
            yield msgspec.structs.replace(head, headers=headers)
        yield Piece(exchange, held[-1].at, Side.REPLY, cleaned)

    def _cleaned(self, reply: _Reply, text: bytes) -> bytes:
        if reply.opaque:
            return self._remover.known(text)
        return self._remover.body(text, side_is_reply=True) if reply.whole else self._remover.text(text)


def _joined(records: Iterable[Head | Piece]) -> bytes:
    return b"".join(record.data for record in records if isinstance(record, Piece))


def _decoded(body: bytes, encoding: str) -> bytes:
    """Return a body without its compression; ``body`` itself if this is none of gzip, deflate and zstd."""
    try:
        if encoding in ("gzip", "x-gzip", "deflate"):
            return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, MAX_TEXT_BYTES)
        if encoding == "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    except (zlib.error, zstandard.ZstdError):
        pass
    return body


class BackgroundWriter:
    """A thread that writes records to a new file. failed: called on this thread, once, with the reason why nothing more
    is written. The traffic goes on then."""

    def __init__(self, file: RecordWriter, failed: Callable[[str], None]):
        self._file = file
        self._failed = failed
        self.error = ""
        self._records: queue.SimpleQueue[AnyRecord] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, record: AnyRecord) -> None:
        """Hand a record over. It is written within milliseconds."""
        if isinstance(record, Piece):
            with self._lock:
                self._waiting_bytes += len(record.data)
                if self._waiting_bytes > MAX_WAITING_BYTES:
                    self._has_room.clear()
        self._records.put(record)

    async def room(self) -> None:
        """Wait until the disk has kept up."""
        await self._has_room.wait()

    def close(self, at: float) -> None:
        """Write the last record, and wait until all are written."""
        self._records.put(Closing(at))
        self._thread.join()

    def _run(self) -> None:
        cleaner = RecordCleaner()
        while True:
            batch = [self._records.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._records.get_nowait())
            closing = isinstance(batch[-1], Closing)
            if not self.error:
                try:
                    self._file.write([cleaned for record in batch for cleaned in cleaner.clean(record)])
                    if closing:
                        self._file.close()
                except Exception as error:  # whatever it is, the traffic goes on
                    self.error = f"{type(error).__name__}: {error}"
                    self._file.abandon()
                    self._failed(self.error)
            self._count_down(sum(len(record.data) for record in batch if isinstance(record, Piece)))
            if closing:
                return

    def _count_down(self, nbytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= nbytes
            full = self._waiting_bytes > MAX_WAITING_BYTES
        if not full and not self._has_room.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._has_room.set)
