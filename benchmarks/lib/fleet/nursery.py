"""The process from which fake engines are forked: ``python -m benchmarks.lib.fleet.nursery``. It has imported all that
an engine needs, so an engine starts in a few milliseconds. Kills all engines, and ends, when its stdin is closed.

Each line of stdin is an EngineOrder as JSON. Each engine that has bound its socket writes "<number> <pid>" to stdout.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import struct
import sys
import traceback
import uuid

import msgspec

from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.process import collect_rarely
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.engine.requests.retention import RetainedLog
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport

FACTOR = struct.Struct("d")


class EngineOrder(msgspec.Struct, frozen=True):
    """An engine to start. factors: file with the slowness of each engine, by number. log: see RetainedLog."""

    number: int
    endpoint: str
    factors: str
    log: str
    costs: Costs
    config: EngineConfig


def run_engine(order: EngineOrder) -> None:
    """Run an engine until its process is killed."""
    with open(order.factors, "rb") as file:
        factors = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    at = order.number * FACTOR.size
    runner = SleepingRunner(order.costs, lambda: FACTOR.unpack_from(factors, at)[0])
    transport = ZmqRouterTransport(order.endpoint)  # its context begins after the fork: threads do not survive a fork
    engine = CommonEngine(order.config, runner, transport, uuid.uuid4().hex, retained_log=RetainedLog(order.log))
    collect_rarely()
    os.write(1, b"%d %d\n" % (order.number, os.getpid()))
    engine.run()


def main() -> None:
    logging.getLogger("fastdeploy.engine").setLevel(logging.ERROR)  # it tells of each client that goes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the engines
    gc.freeze()
    while line := os_readline():
        order = msgspec.json.decode(line, type=EngineOrder)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            try:
                run_engine(order)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
    os.killpg(0, signal.SIGKILL)


def os_readline() -> bytes:
    """Read one line of stdin without a buffer, which a fork would copy."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


if __name__ == "__main__":
    main()
