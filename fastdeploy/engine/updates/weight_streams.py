"""Uploads that a weight session reads while they arrive."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from fastdeploy.core.errors import InvalidField, WrongOrder
from fastdeploy.core.weight_source import StreamSource
from fastdeploy.inter_communicator.messages import BeginUpdateArgs


class _Stream(NamedTuple):
    client: str
    received: int  # bytes


class WeightStreams:
    """The uploads to one session that are neither complete nor broken off. allowed: whether they may have content."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._open: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, source: StreamSource, client: str) -> None:
        """Note the next piece of an upload, or its end. Raises WrongOrder for a piece that does not follow the piece
        before it, and InvalidField for content that may not come as a stream."""
        client_before, received = self._open.get(source.stream, _Stream(client, 0))
        if client != client_before or source.start != received:
            why = f"upload {source.stream!r}: expected the piece from byte {received} of client {client_before!r} on"
            raise WrongOrder(f"{why}, got byte {source.start} of {client!r}")
        if source.nbytes and not self.allowed:
            raise InvalidField("body", "expected a file and no stream, for a delta or a partial update in place")
        if source.state == "open":
            self._open[source.stream] = _Stream(client, received + source.nbytes)
        else:
            self._open.pop(source.stream, None)

    def broken_off(self, clients: Container[str]) -> list[StreamSource]:
        """Forget the uploads whose client is not in ``clients``, and return the sources that tell the staging."""
        lost = {name: stream for name, stream in self._open.items() if stream.client not in clients}
        for name in lost:
            del self._open[name]
        return [StreamSource(name, "", 0, 0, stream.received, "broken") for name, stream in lost.items()]


def may_stream(begin: BeginUpdateArgs) -> bool:
    """Return whether a session that ``begin`` opens can read uploads while they arrive. An upload that breaks off has
    overwritten memory of the new weights. So that memory must not hold the only copy of a value that the session
    keeps."""
    return begin.base is None and not (begin.in_place and begin.partial)
