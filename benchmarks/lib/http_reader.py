"""Incremental readers of HTTP/1.1 responses and of server-sent events. No I/O here.

Used instead of a general HTTP client, since acceptance runs have 5,000 streams open on the cores that the tested server
needs: bytes are timestamped when they arrive and parsed later.
"""

from __future__ import annotations

import httptools


class WireError(Exception):
    """The server broke HTTP, or closed the connection in the middle of a response."""


class ResponseReader:
    """Reader of one HTTP/1.1 response. ``status`` is 0 and ``headers`` (names in lower case) empty until the head is
    complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._ends_with_connection = False

    def feed(self, data: bytes) -> bytes:
        """Add bytes from the socket; return the body bytes that they complete. Raises WireError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise WireError(f"not an HTTP response: {error}") from None
        body = bytes(self._body)
        self._body.clear()
        return body

    def feed_eof(self) -> None:
        """Note that the server closed the connection. Raises WireError if the response is not complete."""
        if not (self.done or self._ends_with_connection):
            raise WireError("connection closed in the middle of a response")
        self.done = True

    # ------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        framed = not self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        self._ends_with_connection = self.status >= 200 and not framed

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.done = self.status >= 200  # else another response follows


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
