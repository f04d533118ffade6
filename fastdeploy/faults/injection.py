"""The faults of one HTTP request, from its headers to its last byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from fastdeploy.faults.rules import Rule

if TYPE_CHECKING:
    from fastdeploy.faults.book import Happening
    from fastdeploy.faults.stream import RequestFaults


class ConnectionBroken(BaseException):
    """Raised where an answer breaks off, and caught by the middleware. Not an Exception: nothing on the way shall make
    an answer of it. end: called in place of the close of the connection, if this process shall die."""

    def __init__(self, end: Callable[[], None] | None = None):
        super().__init__()
        self.end = end


class Injection:
    """The faults of one HTTP request. asked: rules of its headers. trace_id: its X-Request-Id. decided: its
    faults, which the answer names. broken: set when the next event is to break in its middle. silent: no
    comment is sent."""

    def __init__(self, path: str, asked: Sequence[Rule], trace_id: str):
        self.path = path
        self.asked = asked
        self.trace_id = trace_id
        self.decided: list[Happening] = []
        self.broken: ConnectionBroken | None = None
        self.silent = False
        self.request: RequestFaults | None = None  # once a request for tokens was sent to the engine


CURRENT: ContextVar[Injection | None] = ContextVar("faults of this HTTP request", default=None)
