"""The faults of one server: its clients of engines, its middleware and its routes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from fastdeploy.client.engine_client import EngineClient, MakeStream
from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.process import descendants, stat_of
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.faults.book import FaultBook
from fastdeploy.faults.calls import CallFaults
from fastdeploy.faults.injection import CURRENT
from fastdeploy.faults.middleware import ROUTE, FaultMiddleware
from fastdeploy.faults.rules import Rule, read_file, read_schedule
from fastdeploy.faults.signals import EngineSignals, shift_clock, write_signals
from fastdeploy.faults.stream import RequestFaults
from fastdeploy.faults.table import Place
from fastdeploy.fleet.client import FleetClient
from fastdeploy.http.calls import catching, envelope, envelope_error
from fastdeploy.inter_communicator import messages as m

logger = logging.getLogger(__name__)
ON = "on"  # the setting ``faults`` without a schedule file


class ServerFaults:
    """The faults of one process that serves HTTP, as ``http.app.Extension``. They are put into ``client``: its submit
    and its call are replaced. config: faults is not empty; faults_dir is a folder that outlives this process."""

    def __init__(self, config: ServeConfig, client: EngineClient | FleetClient):
        self._client, self._is_fleet = client, isinstance(client, FleetClient)
        schedule = None if config.faults == ON else read_file(config.faults, self._is_fleet)
        self.book = FaultBook(config.faults_dir, schedule)
        self._folder = config.faults_dir
        self._calls = CallFaults(self.book, config, self)
        self._keep_kv = False
        self.book.changed = self.signal
        self.signal()
        self._submit, self._call = client.submit, client.call  # without faults
        client.submit, client.call = self.submit, self.call  # type: ignore[method-assign]
        logger.warning("faults are on: requests can break this server (--faults)")

    def take_clock(self) -> None:
        """Let the wall clock of this process be off as the faults say."""
        shift_clock(lambda: self.book.state.clock_s.get("api_server", 0.0))

    # ------------------------------------------------------------------ http.app.Extension

    @property
    def collector(self) -> Collector:
        """The metric of faults."""
        return self.book

    def middleware(self, app: ASGIApp, may_control: Callable[[Scope], FastDeployError | None]) -> ASGIApp:
        """Return ``app`` with faults. may_control: see FaultMiddleware."""
        jump: Callable[[Rule], None] = lambda rule: self.book.set_clock(  # noqa: E731
            str(rule.parameters["of"]), float(rule.parameters["seconds"])
        )
        return FaultMiddleware(app, self.book, may_control, jump, self._is_fleet)

    def router(self) -> APIRouter:
        """Return the routes of ROUTE, which are control routes."""
        router = APIRouter()

        @router.get(ROUTE)
        @catching(envelope_error)
        async def faults(request: Request) -> Response:
            """List the faults that there are, the rules that are armed, and what happened, oldest first."""
            return envelope(self.book.view())

        @router.post(ROUTE)
        @catching(envelope_error)
        async def arm_faults(request: Request) -> Response:
            """Arm a rule, a list of rules, or a schedule {"seed", "rules"}: all of it or, for a bad one, nothing."""
            try:
                given = msgspec.json.decode(await request.body())
            except msgspec.DecodeError as error:
                raise InvalidField("body", f"expected JSON: {error}") from error
            armed = self.book.arm(read_schedule(given, self._is_fleet))
            return envelope({"armed": [rule.describe() for rule in armed]})

        @router.delete(ROUTE)
        @catching(envelope_error)
        async def disarm_faults(request: Request) -> Response:
            """Disarm the rule that the query names (rule=NAME), or everything: then the clocks are right, the list of
            what happened is empty, and the names of rules begin anew. What hangs goes on."""
            return envelope({"disarmed": self.book.disarm(request.query_params.get("rule"))})

        return router

    # ------------------------------------------------------------------ the client

    async def submit(
        self, request: AddRequest, reader: Reader | None = None, make_stream: MakeStream = RequestStream
    ) -> RequestStream:
        """Send a request for tokens with the faults of its HTTP request. See EngineClient.submit."""
        injection = CURRENT.get()
        if injection is None:
            return await self._submit(request, reader, make_stream)
        if injection.request is None:
            ids = [request.group or request.request_id, injection.trace_id]

            async def version() -> str:
                return (await self._call(m.WeightInfoArgs())).get("version", "")

            chosen = await self.book.decide(Place.REQUEST, injection.asked, injection.path, ids, version=version)
            injection.decided += [happening for _, happening in chosen]
            injection.request = RequestFaults(chosen, self.book, injection, self.act, self._is_fleet)
        faults = injection.request
        if faults.is_empty:
            return await self._submit(request, reader, make_stream)
        request = msgspec.structs.replace(request, output_interval_s=0.0)  # a fault may come behind any token
        stream = await self._submit(request, reader, faults.stream)
        faults.submitted(request.request_id)
        return stream

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make a control call with the faults of its HTTP request. See EngineClient.call."""
        injection = CURRENT.get()
        return await (self._call(args) if injection is None else self._calls.call(injection, args, self._call))

    # ------------------------------------------------------------------ what faults do

    def act(self, rule: Rule, request_id: str) -> None:
        """Kill or stop processes, as a rule says. request_id: of the request whose engine is meant; "" = any engine."""
        of, engine = rule.parameters["of"], self._engine_pid(request_id)
        if rule.fault == "frozen" and of == "server":
            freeze([os.getppid(), *descendants(os.getppid())], float(rule.parameters["seconds"]))
        elif of in ("api_server", "gateway"):
            kill(os.getpid())
        elif engine is None:
            logger.error("fault %s: no engine is connected", rule.fault)
        elif rule.fault == "frozen":
            freeze([engine], float(rule.parameters["seconds"]))
        else:
            kill(engine if of == "engine" else int(stat_of(engine)[1]))  # its parent

    def signal(self, keep_kv: bool | None = None) -> None:
        """Tell the engines what holds now. keep_kv: None = as before."""
        self._keep_kv = self._keep_kv if keep_kv is None else keep_kv
        write_signals(self._folder, EngineSignals(self._keep_kv, self.book.state.clock_s.get("engine", 0.0)))

    def _engine_pid(self, request_id: str) -> int | None:
        """Return the process of the engine that runs a request, else of any engine; None = none is connected."""
        clients = [self._client]
        if isinstance(self._client, FleetClient):
            replicas = [*self._client.replicas_of(request_id), *self._client.membership.quorum]
            clients = [replica.client for replica in replicas]
        return next((client.welcome.pid for client in clients if client.welcome is not None), None)


def kill(pid: int) -> None:
    """Kill a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def freeze(pids: Iterable[int], seconds: float) -> None:
    """Stop processes, and let a program of its own continue them after ``seconds``, since this process may be among
    them or may die."""
    chosen = sorted(pids, key=lambda pid: pid == os.getpid())  # this process stops last
    script = 'sleep "$0"; kill -CONT "$@" 2>/dev/null'
    subprocess.Popen(["/bin/sh", "-c", script, str(seconds), *map(str, chosen)], start_new_session=True)
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
