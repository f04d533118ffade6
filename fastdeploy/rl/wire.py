"""Reading what a server sends: the events of a stream, and the error of an answer that is not 200. No sockets here."""

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
    """Splits a byte stream into lines. Only "\\n" ends a line: JSON leaves U+2028, U+2029 and U+0085 as they are."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES):
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends. Raises MalformedReply for a line of more than
        ``max_bytes`` bytes."""
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if max([self._size, *map(len, ended)]) > self._max_bytes:
            raise MalformedReply(f"a line of the stream has more than {self._max_bytes} bytes")
        return [line.removesuffix(b"\r") for line in ended]


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """The JSON objects of a text/event-stream; None for each comment line. Raises the error that an event carries."""
    lines = LineReader()
    async for chunk in chunks:
        for line in lines.feed(chunk):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event = decode(line[6:])
                if "error" in event:
                    raise error_from(event)
                yield event
            elif line.startswith(b":"):
                yield None


def decode(content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``; raises Unreachable for anything else (a proxy's page, half a line)."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if not isinstance(body, dict):
        raise Unreachable(f"expected a JSON object, got {content[:80]!r}")
    return body


def error_from(body: Mapping[str, Any], status: int = 500) -> FastDeployError:
    """The exception of an error body; its ``detail`` has "status", and "retry_after" in seconds if the reply has it."""
    error = body.get("error")
    if not isinstance(error, dict):  # /health and /ready have no more than a status
        message = str(body.get("status", f"status {status}"))
        unavailable = "rejecting_new_requests" if message.startswith("rejecting") else "engine_dead"
        error = {"message": message, "code": unavailable if status == 503 else None}
    detail = {k: v for k, v in error.items() if k not in ("message", "code", "type", "retry_after")}
    if (wait := _seconds(error.get("retry_after"))) is not None:
        detail["retry_after"] = wait
    return from_wire(str(error.get("code")), str(error.get("message")), detail | {"status": status})


def error_of(status: int, headers: Mapping[str, str], content: bytes) -> FastDeployError:
    """The exception of an answer that is no 200. See :func:`error_from`."""
    try:
        error = error_from(decode(content), status)
    except Unreachable as unreadable:
        kind = FastDeployError if status < 500 else Unreachable
        error = kind(f"status {status}: {unreadable.message}", status=status)
    if (wait := _seconds(headers.get("retry-after"))) is not None:
        error.detail.setdefault("retry_after", wait)
    return error


def _seconds(value: Any) -> float | None:
    """A wait that a server asks for, at most MAX_RETRY_AFTER_S; None for what is no number of seconds (a date)."""
    try:
        wait = float(value)
    except (TypeError, ValueError):
        return None
    return min(max(wait, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(wait) else None
