"""Parsing of a server's replies: the events of a stream, and the error of a reply that is not 200. No sockets here."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from fastdeploy.core.errors import FastDeployError, from_wire
from fastdeploy.rl.errors import MalformedReply, Unreachable

MAX_LINE_BYTES = 256 << 20  # prompt_logprobs of a long prompt are one line
MAX_RETRY_AFTER_S = 60.0


class LineReader:
    """Splits a byte stream into lines. Only "\\n" ends a line: JSON may contain U+2028, U+2029 and U+0085."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES):
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their ends. Raises MalformedReply for a line longer than
        ``max_bytes``."""
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if max([self._size, *map(len, ended)]) > self._max_bytes:
            raise MalformedReply(f"a line of the stream has more than {self._max_bytes} bytes")
        return [line.removesuffix(b"\r") for line in ended]


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of a text/event-stream, and None for each comment line. Raises the error in an event."""
    lines = LineReader()
    async for chunk in chunks:
        for line in lines.feed(chunk):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event = decode_object(line[6:])
                if "error" in event:
                    raise body_error(event)
                yield event
            elif line.startswith(b":"):
                yield None


def decode_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in ``content``. Raises Unreachable for anything else, as the page of a proxy."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict):
        raise Unreachable(f"expected a JSON object, got {content[:80]!r}")
    return body


def body_error(body: Mapping[str, Any], status: int = 500) -> FastDeployError:
    """Return the exception of an error body. Its ``detail`` has "status", and "retry_after" (seconds) if the body has
    it."""
    error = body.get("error")
    if not isinstance(error, dict):  # the body of /health and /ready has only a status
        message = str(body.get("status", f"status {status}"))
        unavailable = "rejecting_new_requests" if message.startswith("rejecting") else "engine_dead"
        error = {"message": message, "code": unavailable if status == 503 else None}
    detail = {k: v for k, v in error.items() if k not in ("message", "code", "type", "retry_after")}
    if (wait := _seconds(error.get("retry_after"))) is not None:
        detail["retry_after"] = wait
    return from_wire(str(error.get("code")), str(error.get("message")), detail | {"status": status})


def reply_error(status: int, headers: Mapping[str, str], content: bytes) -> FastDeployError:
    """Return the exception of a reply whose status is not 200. See :func:`body_error`."""
    try:
        error = body_error(decode_object(content), status)
    except Unreachable as unreadable:
        kind = FastDeployError if status < 500 else Unreachable
        error = kind(f"status {status}: {unreadable.message}", status=status)
    if (wait := _seconds(headers.get("retry-after"))) is not None:
        error.detail.setdefault("retry_after", wait)
    return error


def _seconds(value: Any) -> float | None:
    """Return a Retry-After wait, at most MAX_RETRY_AFTER_S; None if ``value`` is no number of seconds (a date)."""
    try:
        wait = float(value)
    except (TypeError, ValueError):
        return None
    return min(max(wait, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(wait) else None
