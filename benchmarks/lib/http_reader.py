"""Incremental readers of HTTP/1.1 responses and of server-sent events. No I/O here.

Used instead of a general HTTP client, since acceptance runs have 5,000 streams open on the cores that the tested server
needs: bytes are timestamped when they arrive and parsed later.
"""

from __future__ import annotations

from enum import Enum, auto


class WireError(Exception):
    """The server broke HTTP, or closed the connection in the middle of a response."""


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()  # a body with Content-Length
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()  # the CRLF after a chunk
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ResponseReader:
    """Reader of one HTTP/1.1 response. ``status`` is 0 and ``headers`` (names in lower case) empty until the head is
    complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._state = _State.HEAD
        self._buffer = bytearray()
        self._left = 0

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """Add bytes from the socket; return the body bytes that they complete. Raises WireError."""
        self._buffer += data
        body = bytearray()
        while self._advance(body):
            pass
        return bytes(body)

    def feed_eof(self) -> None:
        """Note that the server closed the connection. Raises WireError if the response is not complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        elif self._state is not _State.DONE:
            raise WireError(f"connection closed in the middle of a response ({self._state.name.lower()})")

    def _advance(self, body: bytearray) -> bool:
        """Make one transition; return False if more bytes are needed or the response is complete."""
        match self._state:
            case _State.HEAD:
                return self._read_head()
            case _State.LENGTH | _State.CHUNK_DATA:
                return self._read_data(body)
            case _State.UNTIL_CLOSE:
                body += self._buffer
                self._buffer.clear()
                return False
            case _State.CHUNK_SIZE:
                return self._read_chunk_size()
            case _State.CHUNK_END:
                if (line := self._line()) is None:
                    return False
                if line:
                    raise WireError(f"expected CRLF after a chunk, got {line[:20]!r}")
                self._state = _State.CHUNK_SIZE
                return True
            case _State.TRAILER:
                if (line := self._line()) is None:
                    return False
                if not line:
                    self._state = _State.DONE
                return True
            case _State.DONE:
                return False

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        try:
            self.status = int(first.split(" ", 2)[1])
        except (IndexError, ValueError):
            raise WireError(f"not an HTTP status line: {first[:80]!r}") from None
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if 100 <= self.status < 200:
            self.headers.clear()
        elif self.status in (204, 304):
            self._state = _State.DONE
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = _State.CHUNK_SIZE
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self._state = _State.LENGTH if self._left else _State.DONE
        else:
            self._state = _State.UNTIL_CLOSE
        return True

    def _read_chunk_size(self) -> bool:
        if (line := self._line()) is None:
            return False
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError:
            raise WireError(f"not a chunk size: {line[:20]!r}") from None
        self._state = _State.CHUNK_DATA if self._left else _State.TRAILER
        return True

    def _read_data(self, body: bytearray) -> bool:
        taken = self._buffer[: self._left]
        if not taken:
            return False
        body += taken
        del self._buffer[: len(taken)]
        self._left -= len(taken)
        if self._left == 0:
            self._state = _State.CHUNK_END if self._state is _State.CHUNK_DATA else _State.DONE
        return True


class EventReader:
    """Reader of a text/event-stream body. ``comments`` counts the comment lines."""

    def __init__(self) -> None:
        self.comments = 0
        self._buffer = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the body; return the data of each event that they complete, in order."""
        self._buffer += data
        events: list[bytes] = []
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).rstrip(b"\r")
            del self._buffer[: end + 1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
