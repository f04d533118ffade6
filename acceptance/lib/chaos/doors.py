"""Gateways in processes of their own, which answer at one port together; and the harm that is done to them.

They are forked from a process that has imported all that a gateway needs. The parent holds their sockets, so a gateway
that is started again answers at the same addresses. It restarts engines for them, as the parent of a fleet does.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from acceptance.lib.chaos.load import code_of
from benchmarks.lib.fleet.engines import EngineLauncher, end_with_program
from fastdeploy.bench.client import Client, Reply, WireError
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.listener import bind, url_of
from fastdeploy.core.process import collect_rarely
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Action, Answer, Ask, LocalLauncher, ParentEnd, Placements
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.inter_communicator.peer_transport import ZmqPeerTransport
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many

logger = logging.getLogger(__name__)
SPAWN = multiprocessing.get_context("forkserver")
SERVE = ServeConfig(model="fake", served_model_name="fake", model_roots=("/",))
SLOW_S = 0.02  # a slowed gateway runs for so long, then stands still for as long
ANSWER_S = 20.0  # for a control call
RETRY_S = 0.02
LOG_FORMAT = "%(asctime)s %(process)d %(message)s"
AGAIN = ("engine_dead", "engine_stalled", "not_leader")  # another gateway will answer, or this one soon


def run_door(
    config: FleetConfig,
    address: str,
    listeners: list[socket.socket],
    link: socket.socket,
    begin: Callable[[], None],
    log_level: int,
) -> None:
    """Run a gateway until its process is killed or asked to end. address: for the other gateways. begin: see Doors.
    log_level: of this process."""
    end_with_program()
    logging.basicConfig(level=log_level, format=LOG_FORMAT, force=True)
    collect_rarely()
    begin()

    async def serve() -> None:
        context = context_of_many()
        launcher = LocalLauncher(link, lambda: os._exit(0))
        peers = PeerLink(ZmqPeerTransport(address), lambda at: ZmqConnector(at, context=context))
        client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint, context=context), link=peers)
        await make_server(client, None, SERVE).serve(sockets=listeners)

    uvloop.run(serve())


class Door:
    """One gateway. address: for the other gateways. client: of this gateway alone."""

    def __init__(self, address: str):
        self.address = address
        self.listener = bind("127.0.0.1", 0)
        self.client = Client(url_of(self.listener))
        self.link: ParentEnd | None = None
        self.process: BaseProcess | None = None
        self.harm = ""  # what is being done to it

    def __str__(self) -> str:
        return Path(self.address).stem

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)


class Doors:
    """``num`` gateways of the engines of ``launcher``. Use from one event loop only. begin: called first in the process
    of each gateway. client: of all of them, at one port. harmed_at: time.monotonic() at the end of the last harm."""

    CUTS = ("kill", "end")  # the harm that ends connections

    def __init__(self, config: FleetConfig, launcher: EngineLauncher, num: int, begin: Callable[[], None]):
        self._config, self._launcher, self._begin = config, launcher, begin
        self._folder = tempfile.TemporaryDirectory(prefix="fastdeploy-gateways-")
        self._shared = bind("127.0.0.1", 0)
        self.client = Client(url_of(self._shared))
        self.doors = [Door(f"ipc://{self._folder.name}/gateway-{i}.sock") for i in range(num)]
        self.harmed_at = self._cut_at = self._stalled_at = 0.0
        self._restarts: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for door in self.doors:
            self._start(door)

    def at(self, address: str) -> Door | None:
        """Return the gateway with this address for other gateways."""
        return next((door for door in self.doors if door.address == address), None)

    async def call(self, method: str, path: str, body: Any = None, patience_s: float = 60.0) -> Reply:
        """Make a call at the port of all gateways, and again if the gateway dies or has no leader. Raises the last
        error after ``patience_s``."""
        end = time.monotonic() + patience_s
        while True:
            try:
                reply = await self.client.call(method, path, body, ANSWER_S)
                if code_of(reply.body) not in AGAIN or time.monotonic() > end:
                    return reply
            except (WireError, OSError, TimeoutError):
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Kill all gateways."""
        for door in self.doors:
            door.signal(signal.SIGKILL)
            self._unlink(door)
            if door.process is not None:
                door.process.join()
            door.listener.close()
        for task in self._restarts:
            task.cancel()
        self._shared.close()
        self._folder.cleanup()

    # ------------------------------------------------------------------ harm

    @property
    def unharmed(self) -> list[Door]:
        return [door for door in self.doors if not door.harm]

    def cut_since(self, since: float) -> bool:
        """Return whether a gateway was killed or ended since time.monotonic() was ``since``."""
        return self._cut_at >= since or any(door.harm in self.CUTS for door in self.doors)

    def stalled_since(self, since: float) -> bool:
        """Return whether a gateway was stopped or slowed since time.monotonic() was ``since``."""
        return self._stalled_at >= since or any(door.harm and door.harm not in self.CUTS for door in self.doors)

    async def hurt(self, door: Door, harm: str, seconds: float) -> None:
        """Kill a gateway, end it in order ("end"), stop it or slow it, and let it be as before after ``seconds``."""
        door.harm = harm
        logger.info("%s: %s for %.2f s", door, harm, seconds)
        if harm in self.CUTS:
            door.signal(signal.SIGKILL if harm == "kill" else signal.SIGTERM)
            assert door.process is not None
            await asyncio.to_thread(door.process.join)
            self._unlink(door)
            await asyncio.sleep(seconds)
            self._start(door)
            self._cut_at = time.monotonic()
        elif harm == "stop":
            await self._stand(door, seconds)
        else:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await self._stand(door, SLOW_S)
                await asyncio.sleep(SLOW_S)
        if harm not in self.CUTS:
            self._stalled_at = time.monotonic()
        door.harm, self.harmed_at = "", time.monotonic()
        logger.info("%s: no harm any more", door)

    async def _stand(self, door: Door, seconds: float) -> None:
        door.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        door.signal(signal.SIGCONT)

    # ------------------------------------------------------------------ the parent's work

    def _start(self, door: Door) -> None:
        ours, theirs = socket.socketpair()
        level = logging.getLogger().level
        arguments = (self._config, door.address, [self._shared, door.listener], theirs, self._begin, level)
        door.process = SPAWN.Process(target=run_door, args=arguments, daemon=True)
        door.process.start()
        logger.info("%s: gateway with pid %d", door, door.process.pid)
        theirs.close()
        door.link = ParentEnd(ours)
        door.link.send(Placements(self._launcher.listed))
        asyncio.get_running_loop().add_reader(door.link.fileno(), self._asked, door)

    def _unlink(self, door: Door) -> None:
        if door.link is not None:
            asyncio.get_running_loop().remove_reader(door.link.fileno())
            door.link.close()
            door.link = None

    def _asked(self, door: Door) -> None:
        assert door.link is not None
        asks = door.link.read()
        if asks is None:
            self._unlink(door)
            return
        for ask in asks:
            task = asyncio.ensure_future(self._answer(door, door.link, ask))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    async def _answer(self, door: Door, link: ParentEnd, ask: Ask) -> None:
        assert ask.action is Action.RESTART, "the number of these engines is fixed"
        await self._launcher.restart(ask.name, ask.why)
        if door.link is link:
            link.send(Answer(ask.ask_id, ask.name))


def as_it_is() -> None:
    """Change nothing in a gateway."""


SPAWN.set_forkserver_preload([__name__, "benchmarks.lib.fleet.engines", "benchmarks.lib.report", "fastdeploy.http.app"])
