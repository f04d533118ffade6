"""Lets a scripted engine (support.fake_engine_server) take uploads."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastdeploy.core.weight_source import FileSource
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import FakeEngine

SESSION = "s-1"


class UploadEngine:
    """calls: those with an upload. sessions: those that open, commit and abort the session of an update in one call.
    bodies: of the uploads. paths: of their files.

    refuse: returns the failure of a call, or None. reads: while False, calls with an upload are not answered, until
    :meth:`go_on`."""

    def __init__(self, engine: FakeEngine):
        self.calls: list[m.Args] = []
        self.sessions: list[m.Args] = []
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.refuse: Callable[[m.Args], m.Failure | None] = lambda args: None
        self.reads = True
        self._engine = engine
        self._waiting: list[m.Call] = []
        for kind in (m.UpdatePartArgs, m.UpdateWeightsArgs):
            engine.replies[kind] = self._reply
        for kind in (m.BeginUpdateArgs, m.CommitUpdateArgs, m.AbortUpdateArgs):
            engine.replies[kind] = self._reply_about_session

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
        if self.reads:
            return self._answer(call)
        self._waiting.append(call)
        return None

    def _reply_about_session(self, call: m.Call) -> m.Reply:
        self.sessions.append(call.args)
        return m.Reply(call.call_id, {"session_id": SESSION, "lease_s": 300.0, "version": "9"})

    def _answer(self, call: m.Call) -> m.Reply:
        if (failure := self.refuse(call.args)) is not None:
            return m.Reply(call.call_id, {}, failure)
        assert isinstance(call.args, m.UpdatePartArgs | m.UpdateWeightsArgs)
        assert isinstance(call.args.source, FileSource)
        path = call.args.source.path
        assert os.stat(path).st_mode & 0o077 == 0, "only its owner may read it"
        self.paths.add(path)
        with open(path, "rb") as file:
            self.bodies.append(file.read())
        return m.Reply(call.call_id, {"session_id": SESSION, "lease_s": 300.0, "version": "9", "stage_ms": 1.0})
