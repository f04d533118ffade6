"""The file of a recording: the line MAGIC, then one zstandard frame with the records one after another.

A record is its length (4 bytes, little endian) and a msgpack map. The first one is an Opening, the last one a Closing.
The compressor is flushed after each write, so that a file whose writer was killed can be read up to its last write.
All times are seconds since the recorder's start.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
import zstandard

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.files import write_all

MAGIC = b"fastdeploy traffic\n"
FORMAT = 1
LENGTH_BYTES = 4
READ_BYTES = 1 << 20
MAX_REQUEST_BYTES = 64 << 20  # of a body that a reader holds in memory
Headers = list[tuple[str, str]]


class Outcome(enum.Enum):
    """How an exchange ended."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client_left"  # the client closed its connection before the end of the reply
    UPSTREAM_FAILED = "upstream_failed"
    RECORDER_STOPPED = "recorder_stopped"


class Side(enum.Enum):
    """The direction of a body."""

    REQUEST = "request"
    REPLY = "reply"


class Record(msgspec.Struct, omit_defaults=True):
    """The base of all records."""


class Opening(Record, tag="opening", kw_only=True):
    """The first record. began: seconds since 1970. upstream: its URL, without user and password. version: of
    fastdeploy."""

    format: int = FORMAT
    version: str
    upstream: str
    began: float


class Begin(Record, tag="begin"):
    """The head of a request arrived. target: path and query, as the client sent them."""

    id: int
    at: float
    method: str
    target: str
    headers: Headers


class Head(Record, tag="head"):
    """The head of a reply arrived."""

    id: int
    at: float
    status: int
    headers: Headers


class Piece(Record, tag="piece"):
    """A piece of a body: of a reply with its boundaries, of a request as it arrived."""

    id: int
    at: float
    side: Side
    data: bytes


class Body(Record, tag="body"):
    """A body is complete. hash: blake3, in hexadecimal. kept: whether its pieces are in the file."""

    id: int
    at: float
    side: Side
    size: int
    hash: str
    kept: bool


class End(Record, tag="end"):
    """An exchange is over. error: why, if the engine failed."""

    id: int
    at: float
    outcome: Outcome
    error: str = ""


class Closing(Record, tag="closing"):
    """The recorder was stopped in the regular way."""

    at: float


AnyRecord = Opening | Begin | Head | Piece | Body | End | Closing


class RecordWriter:
    """A writer of a new file. Raises OSError if there is a file of this name."""

    def __init__(self, path: str, opening: Opening):
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by close()
        self._compressor = zstandard.ZstdCompressor(level=3).compressobj()
        self._encoder = msgspec.msgpack.Encoder()
        self.nbytes = 0
        self._write(MAGIC)
        self.write([opening])

    def write(self, records: list[AnyRecord]) -> None:
        """Write the records, so that a reader finds them at once. Raises OSError."""
        parts = []
        for record in records:
            encoded = self._encoder.encode(record)
            parts += [len(encoded).to_bytes(LENGTH_BYTES, "little"), encoded]
        data = self._compressor.compress(b"".join(parts))
        self._write(data + self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

    def close(self) -> None:
        """Raises OSError."""
        with self._file:
            self._write(self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        write_all(self._file, data)
        self.nbytes += len(data)


def read_records(path: str) -> Iterator[AnyRecord]:
    """Yield the records of a file, up to the last one that is whole. Raises InvalidField for another kind of file."""
    try:
        file = open(path, "rb")  # noqa: SIM115  # closed by the ``with`` below
    except OSError as error:
        raise InvalidField("file", f"expected a recording, got {path!r}: {error.strerror}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidField("file", f"expected a recording of `fastdeploy record`, got {path!r}")
        frames = _frames(_decompressed(file))
        opening = next((_decode(frame, path) for frame in frames), None)
        if not isinstance(opening, Opening):
            raise InvalidField("file", f"expected a recording, got {path!r}, which has no first record")
        yield opening
        for frame in frames:
            yield _decode(frame, path)


def _decode(frame: bytes, path: str) -> AnyRecord:
    try:
        return _DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        found = _FORMAT_DECODER.decode(frame).format if frame[:2] else 0
        text = f"it has format {found}, and this version reads {FORMAT}" if found > FORMAT else str(error)
        raise InvalidField("file", f"expected a recording that can be read, got {path!r}: {text}") from None


class _AnyFormat(msgspec.Struct):
    format: int = 0


_DECODER = msgspec.msgpack.Decoder(AnyRecord)
_FORMAT_DECODER = msgspec.msgpack.Decoder(_AnyFormat)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    while data := file.read(READ_BYTES):
        try:
            yield decompressor.decompress(data)
        except zstandard.ZstdError:  # the end was damaged
            return
        if decompressor.eof:
            return


def _frames(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what stands behind each length."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        at = 0
        while (start := at + LENGTH_BYTES) <= len(buffer):
            end = start + int.from_bytes(buffer[at:start], "little")
            if end > len(buffer):
                break
            yield bytes(buffer[start:end])
            at = end
        del buffer[:at]


@dataclass
class Exchange:
    """A request and its reply, as far as the file has them. request: its body, or None if only size and hash are in the
    file; sent: when its last byte arrived. answered: when the reply's head arrived. pieces: of the reply's body.
    outcome: None: the recording ended before."""

    id: int
    began: float
    method: str
    target: str
    headers: Headers
    request: bytes | None = None
    request_size: int = 0
    request_hash: str = ""
    sent: float | None = None
    status: int | None = None
    reply_headers: Headers = field(default_factory=list)
    answered: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    reply_size: int | None = None
    reply_kept: bool = True
    outcome: Outcome | None = None
    error: str = ""
    ended: float | None = None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def name(self) -> str:
        """How a text names the request."""
        return f"{self.method} {self.path} (#{self.id})"


@dataclass
class Recording:
    """A recording. exchanges: in the order in which their requests began. closed: whether the recorder was stopped in
    the regular way; if not, the last exchanges may miss their ends."""

    opening: Opening
    exchanges: list[Exchange]
    closed: bool
    seconds: float


def read_recording(path: str) -> Recording:
    """Return the recording in a file. Request bodies over MAX_REQUEST_BYTES are left out. Raises InvalidField."""
    records = read_records(path)
    opening = next(records)
    assert isinstance(opening, Opening)
    exchanges: dict[int, Exchange] = {}
    requests: dict[int, bytearray] = {}
    closed, last = False, 0.0
    for record in records:
        if isinstance(record, Opening):
            continue
        last = max(last, record.at)
        if isinstance(record, Closing):
            closed = True
        elif isinstance(record, Begin):
            exchanges[record.id] = Exchange(record.id, record.at, record.method, record.target, record.headers)
        elif isinstance(record, Piece) and record.side is Side.REQUEST:
            body = requests.setdefault(record.id, bytearray())
            if len(body) <= MAX_REQUEST_BYTES:
                body += record.data
        else:
            _take(exchanges[record.id], record, requests)
    return Recording(opening, sorted(exchanges.values(), key=lambda one: (one.began, one.id)), closed, last)


def _take(exchange: Exchange, record: Head | Piece | Body | End, requests: dict[int, bytearray]) -> None:
    if isinstance(record, Head):
        exchange.status, exchange.reply_headers, exchange.answered = record.status, record.headers, record.at
    elif isinstance(record, Piece):
        exchange.pieces.append((record.at, record.data))
    elif isinstance(record, End):
        exchange.outcome, exchange.error, exchange.ended = record.outcome, record.error, record.at
    elif record.side is Side.REPLY:
        exchange.reply_size, exchange.reply_kept = record.size, record.kept
    else:
        exchange.sent, exchange.request_size, exchange.request_hash = record.at, record.size, record.hash
        body = bytes(requests.pop(exchange.id, b""))
        exchange.request = body if record.kept and len(body) <= MAX_REQUEST_BYTES else None
