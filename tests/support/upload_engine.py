"""Lets a scripted engine (support.fake_engine_server) take uploads: as streams, or as files."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastdeploy.core.weight_source import FileSource, Source, StreamSource
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import FakeEngine

SESSION = "s-1"


class UploadEngine:
    """calls: every call about weights but the checks. bodies: of the uploads that are complete. open: the bytes so far
    of each upload that is not. broken: number of uploads that broke off with a part of their body. paths: of the files.

    refuse: returns the failure of a call, or None. reads: while False, calls with content are not answered, until
    :meth:`go_on`."""

    def __init__(self, engine: FakeEngine):
        self.calls: list[m.Args] = []
        self.bodies: list[bytes] = []
        self.open: dict[str, bytes] = {}
        self.broken = 0
        self.paths: set[str] = set()
        self.refuse: Callable[[m.Args], m.Failure | None] = lambda args: None
        self.reads = True
        self._engine = engine
        self._waiting: list[m.Call] = []
        kinds = (m.BeginUpdateArgs, m.UpdateChunkArgs, m.CommitUpdateArgs, m.AbortUpdateArgs, m.UpdateWeightsArgs)
        for kind in kinds:
            engine.replies[kind] = self._reply

    @property
    def kinds(self) -> list[str]:
        """The calls, without the pieces of streams."""
        return [
            type(call).__name__.removesuffix("Args")
            for call in self.calls
            if not (isinstance(call, m.UpdateChunkArgs) and isinstance(call.source, StreamSource))
        ]

    @property
    def pieces(self) -> list[m.UpdateChunkArgs]:
        return [c for c in self.calls if isinstance(c, m.UpdateChunkArgs) and isinstance(c.source, StreamSource)]

    def go_on(self) -> None:
        """Answer the calls that wait, and all later ones."""

        def answer() -> None:
            self.reads = True
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                self._engine.send(self._answer(call))

        self._engine.do(answer)

    def _reply(self, call: m.Call) -> m.Reply | None:
        self.calls.append(call.args)
        source = getattr(call.args, "source", None)
        if not self.reads and (isinstance(source, FileSource) or (source is not None and source.nbytes)):
            self._waiting.append(call)
            return None
        return self._answer(call)

    def _answer(self, call: m.Call) -> m.Reply:
        if (failure := self.refuse(call.args)) is not None:
            return m.Reply(call.call_id, {}, failure)
        if isinstance(call.args, m.UpdateChunkArgs | m.UpdateWeightsArgs):
            self._take(call.args.source)
        return m.Reply(call.call_id, {"session_id": SESSION, "lease_s": 300.0, "version": "9", "stage_ms": 1.0})

    def _take(self, source: Source) -> None:
        match source:
            case FileSource(path):
                self._look_at(path)
                with open(path, "rb") as file:
                    self.bodies.append(file.read())
            case StreamSource(state="broken"):
                self.broken += bool(self.open.pop(source.stream, b""))
            case StreamSource():
                body = self.open.setdefault(source.stream, b"")
                assert len(body) == source.start, "pieces come in order"
                if source.nbytes:
                    self._look_at(source.path)
                    with open(source.path, "rb") as file:
                        file.seek(source.offset)
                        self.open[source.stream] = body + file.read(source.nbytes)
                    assert len(self.open[source.stream]) == source.start + source.nbytes
                if source.state == "complete":
                    self.bodies.append(self.open.pop(source.stream))

    def _look_at(self, path: str) -> None:
        assert os.stat(path).st_mode & 0o077 == 0, "only its owner may read it"
        self.paths.add(path)
