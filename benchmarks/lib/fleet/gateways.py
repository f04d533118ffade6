"""Gateways in processes of their own, without HTTP: the program makes their calls, and sees what each of them knows."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import uvloop

from benchmarks.lib.fleet.engines import end_with_program
from fastdeploy.core.process import collect_rarely
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.fleet.peers import PeerLink
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.peer_transport import ZmqPeerTransport
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many

SPAWN = multiprocessing.get_context("forkserver")


class Look(NamedTuple):
    """The members of a gateway, and the CPU seconds of its process. boots: boot ids of the members, by name."""

    leads: bool
    boots: dict[str, str]
    cpu_s: float


class Start(NamedTuple):
    """Begin to connect to the engines."""


class Asked(NamedTuple):
    """Tell what you know."""


Order = Start | Asked | m.Args


async def _serve(pipe: Connection, config: FleetConfig, placements: Sequence[Placement], address: str) -> None:
    context = context_of_many()
    peers = PeerLink(ZmqPeerTransport(address), lambda at: ZmqConnector(at, context=context)) if address else None
    launcher = StaticLauncher(placements)
    client = FleetClient(config, launcher, lambda at: ZmqConnector(at.endpoint, context=context), link=peers)
    ordered = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ordered.set)
    while True:
        await ordered.wait()
        ordered.clear()
        match pipe.recv():
            case Start():
                client.start()
                pipe.send({})
            case Asked():
                pipe.send(_look(client))
            case args:
                pipe.send(await client.call(args))


def _look(client: FleetClient) -> Look:
    welcomes = {replica.name: replica.client.welcome for replica in client.membership.open}
    boots = {name: welcome.boot_id for name, welcome in welcomes.items() if welcome is not None}
    return Look(client.membership.leadership.leads, boots, time.process_time())


def run_gateway(pipe: Connection, config: FleetConfig, placements: Sequence[Placement], address: str) -> None:
    """Run a gateway until its process is killed. address: for the other gateways; "" = there is none."""
    end_with_program()
    logging.disable(logging.CRITICAL)  # it tells of each replica that goes
    collect_rarely()
    uvloop.run(_serve(pipe, config, placements, address))


class Gateway:
    """One gateway, as the program sees it. Its methods block until it has answered, and raise EOFError if its process
    has ended."""

    def __init__(self, config: FleetConfig, placements: Sequence[Placement], address: str):
        self._pipe, theirs = SPAWN.Pipe()
        self.process: BaseProcess = SPAWN.Process(
            target=run_gateway, args=(theirs, config, placements, address), daemon=True
        )
        self.process.start()
        theirs.close()

    def start(self) -> None:
        """Let the gateway connect to the engines."""
        self._order(Start())

    def look(self) -> Look:
        """Return what the gateway knows now."""
        look: Look = self._order(Asked())
        return look

    def call(self, args: m.Args) -> dict[str, Any]:
        """Make a call to the fleet through this gateway, and return its report."""
        report: dict[str, Any] = self._order(args)
        return report

    def _order(self, order: Order) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()


class Gateways:
    """``num`` gateways of the engines at ``placements``, which connect to them from their start on. The
    caller closes them."""

    def __init__(self, config: FleetConfig, placements: Sequence[Placement], num: int):
        self._folder = tempfile.TemporaryDirectory(prefix="fastdeploy-gateways-")
        addresses = [f"ipc://{self._folder.name}/{i}.sock" for i in range(num)] if num > 1 else [""]
        self.all = [Gateway(config, placements, address) for address in addresses]

    def close(self) -> None:
        """Kill all gateways."""
        for gateway in self.all:
            gateway.process.kill()
        for gateway in self.all:
            gateway.process.join()
        self._folder.cleanup()
